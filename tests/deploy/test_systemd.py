"""The unit for systemd is valid, and drains its worker when it is stopped."""

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_code import parse

UNIT = ROOT / "deploy" / "systemd" / "lightningrl-worker.service"
PROGRAM = "/opt/lightningrl/bin/lightningrl"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT.read_text().replace("\\\n", " "))
    return parser


def verified(path: Path) -> str:
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))  # it must exist
    assert UNIT.name not in verified(copy)
    copy.write_text(copy.read_text().replace("KillMode=mixed", "KillMod=mixed"))
    assert "KillMod" in verified(copy)


def test_the_command_exists_with_its_options() -> None:
    words = shlex.split(unit()["Service"]["ExecStart"])
    assert words[0] == PROGRAM
    parse([word.replace("${CONCURRENCY}", "64") for word in words[1:]])


def test_stopping_the_unit_signals_the_worker_alone_and_waits() -> None:
    service = unit()["Service"]
    assert service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > 300
    assert service["Restart"] == "on-failure"
    assert service["DynamicUser"] == "yes"
