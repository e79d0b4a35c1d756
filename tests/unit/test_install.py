"""Choice of a Python by tools/install.sh, and broken installations; python and pip are stand-ins."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.processes import eventually
from tests.worlds import ROOT

# Knows `-` (has it everything?), `-m venv FOLDER`, `-m pip`; pip waits while ../hold exists and fails where
# ../fail does.
PYTHON = """#!/usr/bin/env bash
home=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
  -\\ *) [[ -e $home/complete ]] ;;
  -m\\ venv*) mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" ;;
  -m\\ pip\\ install*)
    echo pip >>"$CALLS"
    touch "$home/half"
    while [[ -e $CALLS.hold ]]; do sleep 0.05; done
    [[ ! -e $CALLS.fail ]] || { echo "no such package"; exit 1; }
    [[ $* != *-e* ]] || touch "$home/complete"
    ;;
  -V) echo "Python 3.11" ;;
esac
"""


@pytest.fixture
def place(tmp_path) -> Path:
    """A clone's folder, and a python3 in bin that has nothing."""
    for name in ("tools/install.sh", "recipes/launch/local.sh"):
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    (tmp_path / "clone/recipe.sh").write_text("source recipes/launch/local.sh\ncommand -v python\n")
    python(tmp_path / "system", name="python3")
    return tmp_path


def python(home: Path, *, name: str = "python", complete: bool = False) -> Path:
    (home / "bin").mkdir(parents=True)
    path = home / "bin" / name
    path.write_text(PYTHON)
    path.chmod(0o755)
    if complete:
        (home / "complete").touch()
    return path


def start(
    place: Path, *command: str, errors: IO[str] | int = subprocess.PIPE, **more: str
) -> subprocess.Popen:
    known = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "VERL_MEGATRON_VENV")
    }
    told = known | {"PATH": f"{place}/system/bin:/usr/bin:/bin", "CALLS": str(place / "calls")} | more
    return subprocess.Popen(
        ["bash", *command],
        cwd=place / "clone",
        env=told,
        text=True,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def install(place: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    process = start(place, "tools/install.sh", *arguments, **more)
    said, errors = process.communicate(timeout=30)
    return process.returncode, said.strip(), errors


def calls(place: Path) -> int:
    return len((place / "calls").read_text().splitlines()) if (place / "calls").exists() else 0


def test_an_installation_that_fails_is_begun_anew(place):
    (place / "calls.fail").touch()
    code, said, errors = install(place)
    assert code == 1 and not said and "no such package" in errors
    assert (place / "clone/.venv/half").exists()
    assert start(place, "recipe.sh").wait(30) == 2, "a recipe must not use what is half-made"
    (place / "calls.fail").unlink()
    (place / "clone/.venv/from_before").touch()
    code, said, errors = install(place)
    assert (code, said) == (0, f"{place}/clone/.venv/bin/python") and "was broken off" in errors
    assert not (place / "clone/.venv/from_before").exists()
    before = calls(place)
    assert install(place)[:2] == (0, said) and calls(place) == before
    assert start(place, "recipe.sh").communicate(timeout=30)[0].strip() == said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_installation_that_is_killed_is_begun_anew(place, number):
    (place / "calls.hold").touch()
    process = start(place, "tools/install.sh")
    assert eventually(lambda: calls(place) == 1)
    os.killpg(process.pid, number)
    process.wait(30)
    (place / "calls.hold").unlink()
    code, said, errors = install(place)
    assert (code, said) == (0, f"{place}/clone/.venv/bin/python") and "was broken off" in errors


def test_two_at_once_install_once(place):
    (place / "calls.hold").touch()
    with (place / "errors").open("a") as errors:
        both = [start(place, "tools/install.sh", errors=errors) for _ in range(2)]

    def waiting() -> int:
        return (place / "errors").read_text().count("another command installs")

    assert eventually(lambda: calls(place) == waiting() == 1)
    (place / "calls.hold").unlink()
    ended = [process.communicate(timeout=30) for process in both]
    assert {said.strip() for said, _ in ended} == {f"{place}/clone/.venv/bin/python"}
    assert waiting() == 1 and calls(place) <= 2


def test_a_python_that_has_everything_comes_first(place):
    half = python(place / "clone/.venv")
    active = python(place / "active")
    (place / "system/complete").touch()
    told = {"VIRTUAL_ENV": str(place / "active")}
    assert install(place, **told)[1] == f"{place}/system/bin/python3" and not calls(place)
    (place / "clone/.venv/complete").touch()
    assert install(place, **told)[1] == str(half)
    (place / "active/complete").touch()
    assert install(place, **told)[1] == str(active)
    assert start(place, "recipe.sh", **told).communicate(timeout=30)[0].strip() == str(active)
    own = python(place / "own", complete=True)
    assert install(place, VERL_MEGATRON_VENV=str(place / "own"), **told)[1] == str(own)


def test_what_was_installed_to_train_is_completed_for_the_tests(place):
    install(place)
    before = calls(place)
    assert install(place, "dev")[0] == 0 and calls(place) > before
    assert (place / "clone/.venv/.verl_megatron").read_text() == "complete dev\n"


def test_an_environment_of_the_user_is_not_removed(place):
    python(place / "own")
    (place / "calls.fail").touch()
    told = {"VERL_MEGATRON_VENV": str(place / "own")}
    assert install(place, **told)[0] == 1
    (place / "own/theirs").touch()
    (place / "calls.fail").unlink()
    assert install(place, **told)[:2] == (0, f"{place}/own/bin/python") and (place / "own/theirs").exists()


def test_what_is_no_environment_is_refused(place):
    (place / "data").mkdir()
    (place / "data/precious").touch()
    code, _, errors = install(place, VERL_MEGATRON_VENV=str(place / "data"))
    assert (
        code == 1 and errors.startswith("install: ") and "is no virtual environment and not empty" in errors
    )
    assert install(place, VERL_MEGATRON_VENV="/proc/nowhere/venv")[2].count("\n") == 1
    assert install(place, "find")[:2] == (1, "")


@pytest.mark.parametrize("works", [True, False])
def test_uv_installs_where_it_is_there_and_pip_where_that_fails(place, works):
    uv = place / "system/bin/uv"
    uv.write_text(
        "#!/usr/bin/env bash\n"
        'echo "uv ${*:1:4}" >>"$CALLS.uv"\n'
        f'{"true" if works else "exit 1"}; [[ $* != *-e* ]] || touch "$(dirname "$4")/../complete"\n'
    )
    uv.chmod(0o755)
    before = place / "clone/.venv/bin/python"
    code, said, errors = install(place)
    assert (code, said) == (0, str(before)), errors
    asked = (place / "calls.uv").read_text().splitlines()
    assert set(asked) == {f"uv pip install --python {before}"}
    # Of pip: torch, which has an index of its own, and without uv the package as well.
    assert calls(place) == (1 if works else 2)
