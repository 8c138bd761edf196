"""The output of ranks other than 0."""

import logging
import sys

from ludic.runs.rank_log import RankLog


def test_what_is_printed_early_and_late_is_in_one_file_and_only_errors_are_shown(tmp_path, capsys):
    with RankLog(3) as log, log.in_use():
        print("early")
        logging.getLogger("ludic.x").warning("a remark")
        log.open_file(tmp_path / "ranks")
        print("late")
        logging.getLogger("ludic.x").error("a fault")
    content = (tmp_path / "ranks" / "rank_0003.log").read_text()
    assert content.splitlines() == ["early", "a remark", "late", "a fault"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "rank 3: a fault" in err
    assert "a remark" not in err
    assert not isinstance(sys.stdout, RankLog)


def test_a_log_is_continued_and_nothing_is_left_without_a_folder(tmp_path):
    for text in ("first", "second"):
        with RankLog(1) as log:
            log.open_file(tmp_path)
            log.write(f"{text}\n")
    assert (tmp_path / "rank_0001.log").read_text() == "first\nsecond\n"
    with RankLog(2) as log:
        log.write("lost with the run")
    assert len(list(tmp_path.iterdir())) == 1
