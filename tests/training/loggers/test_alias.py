"""Metrics under a second name."""

from ludic.training.loggers import AliasLogger
from ludic.training.loggers.local import DOCUMENT_NAMES
from ludic.training.loss.statistics import BUCKET_NAMES


class Log:
    def __init__(self):
        self.lines = []
        self.synced = 0

    def log(self, step, stats):
        self.lines.append((step, dict(stats)))

    def sync(self):
        self.synced += 1


def test_a_metric_is_logged_under_both_names_where_it_is_present():
    inner = Log()
    logger = AliasLogger(inner)
    logger.log(1, {"reference/kl": 0.5, "train/loss": 1.0})
    logger.log(2, {"train/loss": 2.0})
    assert inner.lines == [(1, {"reference/kl": 0.5, "train/loss": 1.0, "train/kl": 0.5}), (2, {"train/loss": 2.0})]


def test_a_name_of_the_step_is_never_replaced():
    inner = Log()
    AliasLogger(inner, {"a": "b", "c": "d"}).log(1, {"a": 1.0, "b": 2.0})
    assert inner.lines == [(1, {"a": 1.0, "b": 2.0})]


def test_no_two_metrics_have_one_alias():
    assert len(set(DOCUMENT_NAMES.values())) == len(DOCUMENT_NAMES)
    assert not set(DOCUMENT_NAMES.values()) & set(DOCUMENT_NAMES)


def test_the_ranges_are_those_of_the_metric():
    assert {name.removeprefix("reference/kl_bucket/") for name in DOCUMENT_NAMES if "bucket" in name} == set(BUCKET_NAMES)


def test_the_inner_logger_is_synced():
    inner = Log()
    AliasLogger(inner).sync()
    assert inner.synced == 1
