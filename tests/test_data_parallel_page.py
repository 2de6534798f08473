"""The tables of docs/data_parallel.md are those of the code, and the published order of three times comes out."""

from __future__ import annotations

from . import data_parallel_page as page


def test_the_page_is_up_to_date() -> None:
    text = page.PAGE.read_text()
    assert text == page.with_tables(text), "run python -m tests.data_parallel_page"


def test_the_published_order_is_predicted() -> None:
    cases = list(page.PUBLISHED)
    assert sorted(cases, key=lambda case: page.seconds(*case)) == sorted(cases, key=page.PUBLISHED.__getitem__)


def test_the_master_needs_more_memory_than_the_others_and_than_ddp() -> None:
    master, other = (page.programs()["DataParallel"].memory(rank).peak for rank in range(2))
    assert other < page.programs()["DDP"].memory().peak < master
