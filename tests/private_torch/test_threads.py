"""Each private torch API in `functional_parallel/_torch/threads.py` does what the library relies on."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from functional_parallel import _torch

from ..threads import in_backward_thread


def test_a_thread_has_objects_of_its_own_and_a_backward_its_callers() -> None:
    own = _torch.of_thread("test", list[str])
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(_torch.of_thread("test", list)))
    thread.start()
    thread.join()
    in_backward_thread(lambda x: found.append(_torch.of_thread("test", list)) or x, torch.ones(1))
    assert _torch.of_thread("test", list) is own
    assert found[0] is not own and found[1] is own


def test_what_a_thread_has_lives_on_when_nobody_else_holds_it() -> None:
    class Held:
        pass

    held = weakref.ref(_torch.of_thread("held", Held))
    gc.collect()
    assert held() is not None and held() is _torch.of_thread("held", Held)


def test_a_pushed_value_is_removed_after_an_error() -> None:
    stack = [1]
    with pytest.raises(KeyError), _torch.pushed(stack, 2):
        assert stack == [1, 2]
        raise KeyError
    assert stack == [1]


def test_a_replacement_lasts_until_the_last_thread_leaves() -> None:
    class Base:
        own = inherited = "torch's"

    class Owner(Base):
        own = "the owner's"

    replacement = _torch.Replacement((Owner, "own", 1), (Owner, "inherited", 2))
    first, second = replacement.active(), replacement.active()
    with pytest.raises(KeyError), first:
        with second:
            assert (Owner.own, Owner.inherited, replacement.originals) == (1, 2, ["the owner's", None])
        assert (Owner.own, Owner.inherited) == (1, 2)
        raise KeyError
    assert Owner.own == "the owner's" and "inherited" not in vars(Owner) and Owner.inherited == "torch's"
