"""Models by name: folders, and ids of the Hub with a cache, a network, a token, or none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings, load
from outrider.errors import ConfigError
from outrider.process.model_files import is_hub_id, with_local_model, with_local_tokenizer
from tests.support.fake_hub import FakeHub, running

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode(),
    "model-1.safetensors": b"weights",
    "pytorch_model.bin": b"the same in another format",
    "original/consolidated.00.pth": b"the same once more",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TOKENIZER = """
import sys
from outrider.config import CoordinatorSettings, load
from outrider.errors import OutriderError
from outrider.process.model_files import with_local_tokenizer
try:
    found = with_local_tokenizer(load(CoordinatorSettings, sys.argv[1:], {}))
    print(found.tokenizer, found.tokenizer_revision)
except OutriderError as error:
    print(f"{type(error).__name__}: {error}")
"""
QUESTION = """
import sys
from outrider.config import TargetSettings, load
from outrider.errors import OutriderError
from outrider.process.model_files import with_local_model
try:
    found = with_local_model(load(TargetSettings, sys.argv[1:], {}))
    print(found.model, found.served_model_name, found.revision)
except OutriderError as error:
    print(f"{type(error).__name__}: {error}")
"""


def ask(home: Path, url: str, *words: str, question: str = QUESTION, **environment: str) -> str:
    """Settings after their model files were found, with a Hub at ``url`` and its cache in ``home``."""
    return run(home, url, "-c", question, *words, **environment).stdout.strip()


def run(home: Path, url: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = environment_of(home, url, **environment)
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=120, check=False)


def environment_of(home: Path, url: str, **environment: str) -> dict[str, str]:
    others = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**others, "HF_HOME": str(home), "HF_ENDPOINT": url, "NO_PROXY": "*", **environment}


def test_a_model_is_downloaded_once_and_then_found_in_the_cache(tmp_path: Path) -> None:
    with running(FakeHub(FILES)) as hub:
        folder, name, revision = ask(tmp_path, hub.url, "--model", "owner/model").split()
        assert (name, revision) == ("owner/model", "None")
        held = {path.name for path in Path(folder).iterdir()}
        assert held == {"config.json", "tokenizer.json", "model.safetensors.index.json", "model-1.safetensors"}
        hub.requests.clear()
        again = ask(tmp_path, hub.url, "--model", "owner/model", "--served-model-name", "mine")
        assert again == f"{folder} mine None"
        assert hub.requests == []
    assert ask(tmp_path, hub.url, "--model", "owner/model", HF_HUB_OFFLINE="1").startswith(folder)


def test_a_cache_without_a_shard_is_completed(tmp_path: Path) -> None:
    with running(FakeHub(FILES)) as hub:
        folder = Path(ask(tmp_path, hub.url, "--model", "owner/model").split()[0])
        (folder / "model-1.safetensors").unlink()
        assert ask(tmp_path, hub.url, "--model", "owner/model").startswith(str(folder))
        assert (folder / "model-1.safetensors").is_file()


def test_a_download_goes_on_where_the_connection_was_lost(tmp_path: Path) -> None:
    """A download asks for the rest of a file alone."""
    content, part = bytes(range(256)) * 100_000, 15_000_000  # parts of 10 MiB are written
    with running(FakeHub({**FILES, "model-1.safetensors": content}, cuts={"model-1.safetensors": [part]})) as hub:
        found = ask(tmp_path, hub.url, "--model", "owner/model")
    (_, sent), (start, rest) = hub.ranges
    assert sent == part
    assert start == 10 << 20
    assert start + rest == len(content)
    assert Path(found.split()[0], "model-1.safetensors").read_bytes() == content


def test_a_killed_download_keeps_its_whole_files(tmp_path: Path) -> None:
    """The next one asks for the others alone, and what was left of them does no harm."""
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {**FILES, "model.safetensors.index.json": json.dumps(index).encode(), "model-2.safetensors": b"more"}
    with running(FakeHub(files, held="model-2.safetensors")) as hub:
        words = [sys.executable, "-c", QUESTION, "--model", "owner/model"]
        download = subprocess.Popen(words, env=environment_of(tmp_path, hub.url), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        whole = {"config.json", "tokenizer.json", "model.safetensors.index.json", "model-1.safetensors"}
        while {path.name for path in tmp_path.glob("hub/*/snapshots/*/*")} != whole:
            assert download.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        download.kill()
        download.wait()
        hub.released.set()
        hub.requests.clear()
        folder = Path(ask(tmp_path, hub.url, "--model", "owner/model").split()[0])
    assert (folder / "model-1.safetensors").read_bytes() == b"weights"
    assert (folder / "model-2.safetensors").read_bytes() == b"more"
    fetched = [request for request in hub.requests if request.startswith("GET") and "resolve" in request]
    assert [request.rpartition("/")[2] for request in fetched] == ["model-2.safetensors"]


def test_only_what_is_read_is_fetched(tmp_path: Path) -> None:
    with running(FakeHub(FILES)) as hub:
        folder = ask(tmp_path, hub.url, "--model", "owner/model", "--load-format", "dummy").split()[0]
    assert not list(Path(folder).glob("*.safetensors"))


@pytest.mark.parametrize(("weights", "is_read"), [("model-1.safetensors", True), ("consolidated.safetensors", False)])
def test_whether_the_hub_has_weights_that_are_read_is_known_before_they_are(
    weights: str, is_read: bool, tmp_path: Path
) -> None:
    question = QUESTION.replace("with_local_model", "require_weights_on_hub").split("try:")[0]
    files = {"pytorch_model.bin": b"a pickle", "original/model.safetensors": b"the same once more", weights: b"weights"}
    with running(FakeHub(files)) as hub:
        question += "require_weights_on_hub('owner/model', None)"
        ended = run(tmp_path, hub.url, "-c", question)
    assert (ended.returncode == 0) is is_read
    assert ("owner/model on the Hub lacks *.safetensors, the only" in ended.stderr) is not is_read


AWQ = json.dumps({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}).encode()


@pytest.mark.parametrize(
    ("words", "files", "said"),
    [
        (("outrider.cli", "serve"), {"config.json": AWQ}, "quant_method 'awq', which is not supported"),
        (
            ("outrider_target", "--port", "1"),
            {"config.json": json.dumps(LLAMA).encode(), "adapter_config.json": b"{}"},
            "adapter_config.json is of an adapter of None, which is not served",
        ),
    ],
)
def test_what_the_configuration_refuses_is_not_downloaded(
    words: tuple[str, ...], files: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    with running(FakeHub({**FILES, **files})) as hub:
        ended = run(tmp_path, hub.url, "-m", *words, "--model", "owner/model", "--device", "cpu")
    assert ended.returncode == 1
    assert said in " ".join((ended.stdout + ended.stderr).split())
    assert not [request for request in hub.requests if request.endswith(".safetensors")]


def test_what_the_configuration_does_not_refuse_is_downloaded(tmp_path: Path) -> None:
    words = ("--model", "owner/model")
    with running(FakeHub({**FILES, "config.json": json.dumps(LLAMA).encode()})) as hub:
        folder = ask(tmp_path, hub.url, *words, question=QUESTION.replace("{}))", "{}), reads_configuration=True)"))
    assert Path(folder.split()[0], "model-1.safetensors").is_file()


def test_an_adapter_on_the_hub_is_no_model(tmp_path: Path) -> None:
    with running(FakeHub({"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"})) as hub:
        told = ask(tmp_path, hub.url, "--model", "owner/model")
    assert told.startswith("ModelError: target model: owner/model on the Hub is an adapter (LoRA), not a model: merge")


def test_revisions_and_tokens(tmp_path: Path) -> None:
    with running(FakeHub(FILES, token="secret")) as hub:
        told = ask(tmp_path, hub.url, "--model", "owner/model")
        assert told.startswith("ModelError: target model: owner/model is no folder here and no model at")
        assert told.endswith("a private one needs HF_TOKEN")
        hub.gated = True
        assert "owner/model is gated: accept its terms" in ask(tmp_path, hub.url, "--model", "owner/model")
        words = ("--model", "owner/model", "--revision")
        assert ask(tmp_path, hub.url, *words, "v1", HF_TOKEN="secret").endswith("owner/model None")
        assert "owner/model has no revision 'v9'" in ask(tmp_path, hub.url, *words, "v9", HF_TOKEN="secret")


def test_without_a_network_the_error_says_what_helps(tmp_path: Path) -> None:
    told = ask(tmp_path, "http://127.0.0.1:1", "--model", "owner/model")
    assert told.startswith("ModelError: target model: owner/model is no folder here and not in the cache")
    assert "could not be downloaded from http://127.0.0.1:1" in told
    assert told.endswith("without a network, copy the model here and name its folder")
    told = ask(tmp_path, "http://127.0.0.1:1", "--model", "owner/model", HF_HUB_OFFLINE="1")
    assert "while HF_HUB_OFFLINE is set: unset it, or name a folder" in told


def test_a_tokenizer_is_fetched_without_weights(tmp_path: Path) -> None:
    words, files = ("--tokenizer", "owner/model"), {**FILES, "chat_template.jinja": b"{{ messages }}"}
    with running(FakeHub({**files, "tokenizer_config.json": b"{}", "vocab.json": b"{}"})) as hub:
        folder, revision = ask(tmp_path, hub.url, *words, "--tokenizer-revision", "v1", question=TOKENIZER).split()
        held = {path.name for path in Path(folder).iterdir()}
        assert held == {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
        assert revision == "None"
        assert ask(tmp_path, hub.url, *words, question=TOKENIZER) == f"{folder} None"
        hub.requests.clear()
        assert ask(tmp_path, hub.url, *words, question=TOKENIZER) == f"{folder} None"
        assert hub.requests == []
    assert ask(tmp_path, hub.url, *words, question=TOKENIZER, HF_HUB_OFFLINE="1") == f"{folder} None"


def test_a_cache_with_the_tokenizer_alone_serves_offline(tmp_path: Path) -> None:
    with running(FakeHub({"tokenizer.json": b"{}"})) as hub:
        told = ask(tmp_path, hub.url, "--tokenizer", "owner/model", question=TOKENIZER)
    assert ask(tmp_path, hub.url, "--tokenizer", "owner/model", question=TOKENIZER, HF_HUB_OFFLINE="1") == told


def test_a_repository_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with running(FakeHub({"config.json": b"{}"})) as hub:
        told = ask(tmp_path, hub.url, "--tokenizer", "owner/model", question=TOKENIZER)
    assert told == "ModelError: coordinator tokenizer: owner/model on the Hub has no tokenizer.json"


def test_a_coordinator_by_itself_says_which_tokenizer_it_lacks(tmp_path: Path) -> None:
    words = ("-m", "outrider_coordinator", "--target-address", "127.0.0.1:1", "--tokenizer", "owner/model")
    ended = run(tmp_path, "http://127.0.0.1:1", *words, HF_HUB_OFFLINE="1")
    assert ended.returncode == 1
    assert "coordinator tokenizer: owner/model is no folder here, and not in the cache" in ended.stdout + ended.stderr


def test_a_revision_of_a_tokenizer_needs_an_id() -> None:
    for words, told in (([], "no tokenizer is"), (["--tokenizer", "/t"], "/t is no id")):
        with pytest.raises(ConfigError, match=rf"coordinator\.tokenizer_revision: is set, and {told}"):
            with_local_tokenizer(load(CoordinatorSettings, [*words, "--tokenizer-revision", "v1"], {}))


def test_a_folder_is_never_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert is_hub_id("owner/model")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("owner/model")
    for name in ("/a/b", "./a", "../a", "a", "a/b/c", "~/a", "a/", "/a"):
        assert not is_hub_id(name)


def test_a_revision_needs_an_id() -> None:
    with pytest.raises(ConfigError, match=r"target\.revision: is set, and /m is no id"):
        with_local_model(load(TargetSettings, ["--model", "/m", "--revision", "v1"], {}))


def test_a_draft_without_a_model_has_nothing_to_find() -> None:
    settings = load(DraftSettings, ["--method", "ngram"], {})
    assert with_local_model(settings) is settings
