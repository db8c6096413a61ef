from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream.engine.loader.cache_folder import cache_root, is_current, make_once_blocking


def silent(line):
    del line


def write(text):
    return lambda fresh: (fresh / "file").write_text(text)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLIPSTREAM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"SLIPSTREAM_CACHE": "", "XDG_CACHE_HOME": "/b"}, Path("/b/slipstream")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/slipstream"),
        ({}, Path.home() / ".cache/slipstream"),
    ],
)
def test_the_cache_lies_where_the_environment_says(environ, expected):
    assert cache_root(environ) == expected


def test_a_folder_is_made_once_and_again_only_for_another_stamp(tmp_path):
    folder = tmp_path / "models" / "m"
    make_once_blocking(folder, "1", write("first"), say=silent)
    make_once_blocking(folder, "1", write("never"), say=silent)
    assert (folder / "file").read_text() == "first"
    make_once_blocking(folder, "2", write("second"), say=silent)
    assert (folder / "file").read_text() == "second"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["m"]


def test_a_failure_leaves_no_folder_and_keeps_the_old_one(tmp_path):
    folder = tmp_path / "m"

    def fail(fresh):
        (fresh / "file").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make_once_blocking(folder, "1", fail, say=silent)
    assert not any(path.is_dir() for path in tmp_path.iterdir())
    make_once_blocking(folder, "1", write("whole"), say=silent)
    with pytest.raises(RuntimeError, match="disk full"):
        make_once_blocking(folder, "2", fail, say=silent)
    assert (folder / "file").read_text() == "whole"
    assert is_current(folder, "1")


def test_the_folder_is_not_there_before_it_is_whole(tmp_path):
    seen = []
    make_once_blocking(tmp_path / "m", "1", lambda _: seen.append((tmp_path / "m").exists()), say=silent)
    assert seen == [False]


def test_a_second_maker_waits_for_the_first_and_makes_nothing(tmp_path):
    folder = tmp_path / "m"
    waiting, started = threading.Event(), threading.Event()
    said, made = [], []

    def slow(fresh):
        started.set()
        assert waiting.wait(10), "the second never came to wait"
        made.append("first")
        (fresh / "file").write_text("first")

    def note(line):
        said.append(line)
        waiting.set()

    first = threading.Thread(target=make_once_blocking, args=(folder, "1", slow), kwargs={"say": silent})
    first.start()
    assert started.wait(10)
    make_once_blocking(folder, "1", lambda _: made.append("second"), say=note)
    first.join(10)
    assert made == ["first"]
    assert said == ["waiting for another process that prepares m"]
    assert (folder / "file").read_text() == "first"


KILLED_MAKER = """
import sys, time
from pathlib import Path
from slipstream.engine.loader.cache_folder import make_once_blocking
def make(fresh):
    (fresh / "file").write_text("half")
    print("making", flush=True)
    time.sleep(60)
make_once_blocking(Path(sys.argv[1]), "1", make, say=print)
"""


def test_a_maker_that_was_killed_blocks_nobody_and_its_rest_is_removed(tmp_path):
    folder = tmp_path / "m"
    command = [sys.executable, "-c", KILLED_MAKER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "making\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.glob(".m.tmp-*"))) == 1
    make_once_blocking(folder, "1", write("whole"), say=silent)
    assert (folder / "file").read_text() == "whole"
    assert list(tmp_path.glob(".m.tmp-*")) == []
