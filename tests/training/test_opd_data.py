"""The hidden-state cache and the order in which heads are visited."""

import os
import threading

import torch

from opd.cache import HiddenCache, Key, sample_digest
from opd.order import Heads, Work, by_teacher, plan


def test_states_come_back_as_they_were_put(tmp_path):
    cache = HiddenCache(tmp_path)
    key = Key(sample_digest([1, 2, 3], 0, [1, 2]), "a", "v1")
    assert cache.get(key) is None
    hidden = torch.randn(2, 5)
    assert torch.equal(cache.put(key, hidden), hidden)
    again = HiddenCache(tmp_path)
    assert torch.equal(again.get(key), hidden)
    assert (again.hits, again.misses) == (1, 0)


def test_every_part_of_the_key_matters(tmp_path):
    cache = HiddenCache(tmp_path)
    sample = sample_digest([1, 2, 3], 0, [1, 2])
    cache.put(Key(sample, "a", "v1"), torch.zeros(2, 5))
    others = [
        Key(sample_digest([1, 2, 4], 0, [1, 2]), "a", "v1"),
        Key(sample_digest([1, 2, 3], 1, [1, 2]), "a", "v1"),
        Key(sample_digest([1, 2, 3], 0, [2]), "a", "v1"),
        Key(sample, "b", "v1"),
        Key(sample, "a", "v2"),
    ]
    assert all(cache.get(key) is None for key in others)
    assert HiddenCache(tmp_path, torch.bfloat16).get(Key(sample, "a", "v1")) is None


def test_computed_and_found_states_have_one_precision(tmp_path):
    cache = HiddenCache(tmp_path, torch.bfloat16)
    key = Key("s", "a", "v")
    first = cache.put(key, torch.randn(4, 3))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, cache.get(key))


def test_a_killed_writer_leaves_nothing_readable(tmp_path):
    cache = HiddenCache(tmp_path)
    key = Key("s", "a", "v")
    path = cache.path(key)
    path.parent.mkdir()
    path.with_name(f".{path.name}.dead").write_bytes(b"half")
    assert cache.get(key) is None
    cache.put(key, torch.ones(1, 1))
    assert torch.equal(cache.get(key), torch.ones(1, 1))


def test_prune_removes_the_oldest(tmp_path):
    cache = HiddenCache(tmp_path)
    keys = [Key(str(i), "a", "v") for i in range(4)]
    for i, key in enumerate(keys):
        cache.put(key, torch.zeros(10, 10))
        os.utime(cache.path(key), (i, i))
    size = cache.path(keys[0]).stat().st_size
    assert cache.prune(2 * size) == 2
    assert [cache.get(key) is not None for key in keys] == [False, False, True, True]


def test_a_minibatch_visits_each_teacher_once_and_starts_with_the_resident():
    work = [Work(i, "bca"[i % 3], 1.0) for i in range(9)]
    groups = by_teacher(work, resident="b")
    assert [name for name, _ in groups] == ["b", "a", "c"]
    assert [item.sample for item in groups[0][1]] == [0, 3, 6]
    planned = plan([work, work])
    assert [[name for name, _ in groups] for groups in planned] == [["a", "b", "c"], ["c", "a", "b"]]


def test_at_most_one_head_is_resident_and_the_next_is_read_meanwhile():
    heads = {name: torch.full((2, 2), float(i)) for i, name in enumerate("abc")}
    reading = {name: threading.Event() for name in "abc"}

    def load(name):
        reading[name].set()
        return heads[name].clone()

    device = Heads(load)
    seen = []
    for name, head in device.visit(["a", "b", "c"]):
        seen.append(name)
        assert device.name == name
        assert torch.equal(head, heads[name])
        following = {"a": "b", "b": "c"}.get(name)
        if following:
            assert reading[following].wait(5), "the next head is read while this one is in use"
    assert [name for name, _ in device.visit(["c", "a"])] == ["c", "a"]
    assert seen == ["a", "b", "c"]
    assert device.loads == 4, "the resident head is not loaded again"
    device.close()
