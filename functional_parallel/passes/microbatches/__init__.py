"""Microbatches: split a batch, choose the ops that run per microbatch, unroll and sum them."""
