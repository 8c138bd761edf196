import threading

import pytest

from ludic.envs.code_exec.pool import LRUCache
from ludic.envs.code_exec.types import BatchTestResult
from ludic.errors import ConfigError


def named(name):
    return BatchTestResult([], name, "t")


def test_get_and_put_make_a_result_the_last_to_go():
    cache = LRUCache(2)
    for name in "ab":
        cache.put(name, "t", named(name))
    assert cache.get("a", "t") is not None
    cache.put("c", "t", named("c"))  # b was used longest ago
    assert cache.get("b", "t") is None
    assert cache.get("a", "t").code_hash == "a"
    cache.put("a", "t", named("new"))
    cache.put("d", "t", named("d"))  # c goes, because a was put again
    assert cache.get("c", "t") is None
    assert cache.get("a", "t").code_hash == "new"


def test_counts_survive_a_clear():
    cache = LRUCache()
    assert cache.hit_rate == 0
    cache.put("a", "t", named("a"))
    cache.get("a", "t"), cache.get("a", "other tests")
    cache.clear()
    assert cache.stats == {"hits": 1, "misses": 1, "size": 0, "max_size": 10_000}
    assert cache.hit_rate == 0.5


def test_threads_lose_no_count():
    cache = LRUCache(3)

    def use():
        for i in range(500):
            cache.put(str(i % 5), "t", named("x"))
            cache.get(str(i % 7), "t")

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.stats["hits"] + cache.stats["misses"] == 2000
    assert cache.stats["size"] == 3


def test_an_empty_cache_is_refused():
    with pytest.raises(ConfigError, match=r"max_size \(0\)"):
        LRUCache(0)
