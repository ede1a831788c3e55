"""`nearstep offload`."""

import typer
from typer.testing import CliRunner

from nearstep.cli.offload import command

RUNNER = CliRunner()
APP = typer.Typer()
APP.command()(command)

SMALL = ("golden:axdimm", "--layers", "2", "--width", "16", "--batch", "4")


def run(*arguments: str) -> tuple[int, str]:
    done = RUNNER.invoke(APP, [*SMALL, *arguments], env={"COLUMNS": "300"})
    return done.exit_code, done.output


def test_one_of_several_processors_computes() -> None:
    there = ("--platform", "memferry-a100", "--host-rate", "1e9")
    code, output = run(*there, "--compute", "gpu1")
    assert code == 0, output
    assert "gpu1" in output
    assert "0 bits differ" in output
    for options, said in (
        (there, "compute must be a part with fp32 FLOP/s in memferry-a100, of gpu0"),
        ((*there[:2], "--compute", "gpu1"), "memory must be a part that updates parameters"),
    ):
        code, output = run(*options)
        assert code == 2
        assert said in output
