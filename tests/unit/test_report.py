"""ringtrain report: the page of runs that are whole, broken off or hardly begun."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ringtrain import cli
from ringtrain.config import files
from ringtrain.config.sections import Config, DataConfig, OptimizerConfig
from ringtrain.monitor import journal

VOID = {"meta", "br"}
NASTY = "<script>alert('a')</script> & | *b*"


class Outline(HTMLParser):
    """Reads a page, and notes tags that are closed in the wrong order or not at all."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.wrong += self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def make_run(folder: Path, rate: float = 0.001, epochs: int = 3, whole: bool = True) -> Path:
    """A run of two ranks, started twice."""
    (folder / "logs").mkdir(parents=True)
    config = Config(data=DataConfig(name=NASTY), optimizer=OptimizerConfig(learning_rate=rate))
    (folder / "config.toml").write_text(f"# steps_per_epoch = 10\n# num_ranks = 2\n\n{files.to_toml(config)}")
    records = [
        {
            **{"epoch": epoch, "global_step": 10 * epoch, "loss": 2.0 / 10**epoch, "accuracy": 0.5 + epoch / 20},
            **{"test_loss": 1 / epoch, "test_accuracy": 0.625 if epoch == 2 else 0.5, "evaluate_s": 0.5},
            **{"learning_rate": rate, "images_per_s": 1234.5 * epoch, "time_s": 1000.0 + epoch},
        }
        for epoch in range(1, epochs + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    steps = [{"epoch": 1, "global_step": 5, "loss": 3.0, "learning_rate": rate, "images_per_s": None}]
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in steps) + '{"torn')
    for rank in (0, 1):
        first, second = (journal.Journal(folder, rank, 2, start, start) for start in (0, 1))
        first.write("start", global_step=0, versions={"keras": "3.15.1"})
        second.write("start", global_step=10, resumed_from="step-10")
        second.write("end", global_step=10 * epochs, stopped_by="", exit_code=0)
    straggler = {"of_rank": 1, "of_host": "far", "times": 2.5, "part": "input", "global_step": 12}
    journal.Journal(folder, 0, 2, 1, 1).write("straggler", **straggler)
    if whole:
        totals = {"step_s": 3.0, "input_s": 0.3, "compute_s": 1.5, "callbacks_s": 0.2, "wait_s": 1.0, "num_steps": 100}
        ranks = [{"rank": rank, "host": "near", "step_s": 0.03, "totals": totals, "num_steps": 50} for rank in (0, 1)]
        summary = {"images_per_s": 2000.0, "num_ranks": 2, "restarts": 1, "restart_causes": [NASTY], "ranks": ranks}
        summary |= {"started": 9e9, "fit_s": 9.0, "versions": {"keras": "3.15.1"}, "in_sync": True, "checksum": "abc"}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def page_of(*words: object) -> Outline:
    assert cli.main(["report", *map(str, words)]) == 0
    out = Path(words[0]) / "report.html"
    text = out.read_text()
    linked = re.sub(r'xmlns(:xlink)?="[^"]*"|url\(#', "", text)  # names of SVG, and parts of a chart
    assert not re.search(r"https?:|\bsrc=|@import|url\(|\bNaN\b|\bnan\b|None", linked)
    outline = Outline(text)
    assert outline.wrong == [] and "script" not in outline.seen
    return outline


def test_the_parser_would_notice_what_is_not_closed() -> None:
    assert Outline("<p><b>x</p></b>").wrong and Outline("<p>").wrong and not Outline("<p><br><i>x</i></p>").wrong


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = make_run(tmp_path / "<i>run & co")
    seen = page_of(folder)
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    text = "\n".join(seen.text)
    assert seen.seen.count("figure") == 4 and "i" not in seen.seen
    parts = ["<i>run & co", NASTY, "started 2 times, complete", "2,000 rows/s", "start 2", "3.00 ms", "15.00 ms"]
    for said in [*parts, "3.15.1", "far", "2.5", "equal, abc"]:
        assert said in text, said
    assert "data.name" in text and "optimizer.learning_rate" not in text, "only options that are not at their defaults"


def test_a_run_of_a_script_shows_its_validation(tmp_path: Path) -> None:
    text = "\n".join(page_of(make_run(tmp_path / "test")).text)
    assert "val accuracy" not in text and "validation" not in text
    folder = make_run(tmp_path / "script")
    records = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(records.replace("test_", "val_"))
    seen = page_of(folder)
    text = "\n".join(seen.text)
    assert seen.seen.count("figure") == 4 and text.count("validation") == 2, "in the legends of loss and of accuracy"
    assert "val accuracy" in text and "test accuracy" not in text


def test_every_metric_has_a_curve_and_what_a_batch_is_may_be_unknown(tmp_path: Path) -> None:
    """As of a GAN that trains batches of tf.data."""
    folder = make_run(tmp_path / "gan")
    losses = {"d_loss": 0.5, "g_loss": 1.5, "val_f1": 0.25, "confusion": [[1, 2]]}
    position = {"epoch": 1, "global_step": 10, "images_per_s": 33.0, "learning_rate": 0.1, "time_s": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(losses | position))
    numbers = "# global_batch_size = 1\n# accumulation_steps = 1\n"
    (folder / "config.toml").write_text(f'{numbers}\n[data]\nname = "tf.data.Dataset"\n')
    page_of(folder)
    page = (folder / "report.html").read_text()
    titles = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert titles[:5] == ["d loss", "g loss", "f1", "learning rate", "speed of all ranks, batches/s"]
    assert "<td>a batch of the data</td>" in page and "<td>2,000 batches/s</td>" in page


def test_runs_side_by_side_show_what_differs(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a" / "run", 0.001), make_run(tmp_path / "b" / "run", 0.5, epochs=2, whole=False)]
    text = "\n".join(page_of(*folders).text)
    configuration = text.split("Configuration")[1].split("Versions and hosts")[0]
    assert re.findall(r"\w+\.\w+_\w+", configuration) == ["optimizer.learning_rate"]
    assert str(folders[1]) in text
    assert "0.001\n0.5\n" in configuration and "steps\n30\n20\n" in text


def test_a_run_that_has_hardly_begun(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.toml").write_text("seed = 0\n[data]\nname = 'digits'\n[gone]\nwith = 'another version'\n")
    seen = page_of(folder)
    text = "\n".join(seen.text)
    assert "figure" not in seen.seen and "another version" in text
    (folder / "metrics.jsonl").write_text('{"global_step": 1, "epo')
    (folder / "summary.json").write_text("{")
    (folder / "config.toml").write_text("torn = '")
    page_of(folder)
    capsys.readouterr()


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for words, said in ((["empty"], "nothing of a run in it"), (["run", "--out", "none/x.html"], "cannot be written")):
        assert cli.main(["report", *(word if word[0] == "-" else str(tmp_path / word) for word in words)]) == 2
        assert said in capsys.readouterr().err
