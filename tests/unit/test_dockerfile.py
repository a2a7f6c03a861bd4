"""The Dockerfile, as far as it can be held without building it; `make image` builds it."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction and its argument, without comments, on one line."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def stages() -> list[list[tuple[str, str]]]:
    """Instructions of each stage; those before the first one set its arguments."""
    found: list[list[tuple[str, str]]] = [[]]
    for word, rest in instructions(DOCKERFILE):
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found[1:]


def values(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for word, rest in stage if word == name]


def sent(path: str) -> bool:
    """Whether .dockerignore lets a path through to the build: the last line that fits it decides."""
    parts = path.split("/")
    prefixes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    answer = True
    for line in filter(None, IGNORED):
        if line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        fits = any(fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes)
        if pattern.startswith("**/"):
            fits = pattern.removeprefix("**/") in parts
        if fits:
            answer = line.startswith("!")
    return answer


def test_the_setup_script_runs_in_a_stage_of_its_own() -> None:
    system, environment, image = stages()
    assert values(environment, "ARG") == ["GPU=0"]
    assert any(run.endswith("launch/setup.sh") and "RINGTRAIN_GPU=$GPU" in run for run in values(environment, "RUN"))
    assert ("COPY", "--from=environment /opt/ringtrain/.venv .venv") in image
    for stage in (system, image):
        runs = " ".join(values(stage, "RUN"))
        for builder in ("setup.sh", "pip", "g++", "make"):
            assert builder not in runs.split()


def test_it_runs_as_an_ordinary_user() -> None:
    _, _, image = stages()
    assert [word for word, _ in image].index("USER") > max(n for n, (word, _) in enumerate(image) if word == "RUN")
    (user,) = values(image, "USER")
    assert user.isdecimal() and user != "0"  # a number, by which Kubernetes knows that it is not root
    assert any(re.search(rf"useradd .*--uid {user}\b", run) for run in values(image, "RUN"))


def test_no_host_keys_are_handed_out() -> None:
    (run,) = (run for stage in stages() for run in values(stage, "RUN") if "openssh-server" in run)
    assert "iproute2" in run.split(), "host agents ask `ip`"
    assert re.search(r"openssh-server.* && rm -rf .*/etc/ssh/ssh_host_\*", run)


def test_what_is_copied_is_sent_to_the_build_and_nothing_else() -> None:
    copied = [line for word, line in instructions(DOCKERFILE) if word == "COPY" and "--from" not in line]
    names = [name for line in copied for name in line.split()[:-1] if "*" not in name]
    assert "ringtrain" in names
    for name in names:
        assert (ROOT / name).exists() and sent(name), name
    assert sent("dist/ringtrain_horovod-0.28.1.post1-py3-none-manylinux_2_35_x86_64.whl")
    left_out = [".git/config", ".venv/bin/python", "runs/digits/model.keras", "keys/id_rsa", ".env", "tests"]
    assert not [path for path in (*left_out, "dist/NOTES.md", "ringtrain/__pycache__/x.pyc") if sent(path)]


def test_sshd_says_which_key_it_lacks(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    result = subprocess.run([ROOT / "launch" / "sshd.sh"], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "-v $PWD/keys:/keys:ro" in result.stderr
