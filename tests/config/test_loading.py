"""Settings from flags, environment and file: who wins, and what is said when something is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from outrider.cli.settings_flags import parse_set
from outrider.config import (
    CoordinatorSettings,
    DraftSettings,
    FlagNames,
    GatewaySettings,
    Section,
    TargetSettings,
    load,
    load_all,
    load_named,
    to_argv,
)
from outrider.config.fields import DraftMethod, DraftSampleMethod, RejectionSampleMethod
from outrider.config.flag_groups import value_name
from outrider.config.sources import read_file
from outrider.errors import ConfigError
from outrider.types import AcceptanceMethod


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(
        """
        target: {model: /models/target, page_size: 8, port: 7001, dtype: bfloat16}
        draft: {model: /models/draft}
        coordinator: {num_speculative_tokens: 3}
        """
    )
    return path


def test_flag_over_environment_over_file_over_default(file: Path) -> None:
    environ = {"OUTRIDER_TARGET_PORT": "7002", "OUTRIDER_TARGET_PAGE_SIZE": "32"}
    settings = load(TargetSettings, ["--config", str(file), "--port", "7003"], environ)
    assert settings.port == 7003
    assert settings.page_size == 32
    assert settings.dtype == "bfloat16"
    assert settings.max_batched_tokens is None


def test_the_file_may_be_named_by_a_variable(file: Path) -> None:
    assert load(TargetSettings, [], {"OUTRIDER_CONFIG": str(file)}).page_size == 8


def test_one_file_serves_all_processes(file: Path) -> None:
    assert load(DraftSettings, ["--config", str(file)], {}).model == "/models/draft"
    assert load(CoordinatorSettings, ["--config", str(file)], {}).num_speculative_tokens == 3


def test_an_empty_variable_is_unset(file: Path) -> None:
    assert load(TargetSettings, ["--config", str(file)], {"OUTRIDER_TARGET_PORT": ""}).port == 7001


def test_variables_that_kubernetes_makes_for_a_service_are_passed_over() -> None:
    environ = {
        "OUTRIDER_COORDINATOR_PORT": "tcp://10.0.0.7:50050",
        "OUTRIDER_COORDINATOR_SERVICE_HOST": "10.0.0.7",
        "OUTRIDER_COORDINATOR_SERVICE_PORT": "50050",
        "OUTRIDER_COORDINATOR_PORT_50050_TCP_ADDR": "10.0.0.7",
    }
    assert load(CoordinatorSettings, [], environ).port == 50050


def test_former_names_of_settings_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("target: {model: m, num_awake_processors: 2}", encoding="utf-8")
    environ = {"OUTRIDER_TARGET_MAX_PREFILL_BESIDE": "64", "OUTRIDER_CONFIG": str(file)}
    settings = load(TargetSettings, [], environ)
    assert (settings.num_pinned_cpus, settings.max_mixed_prefill_tokens) == (2, 64)
    assert load(TargetSettings, ["--num-awake-processors", "0"], environ).num_pinned_cpus == 0
    assert parse_set(["coordinator.num_awake_processors=1"]) == {("coordinator", "num_pinned_cpus"): "1"}
    with pytest.raises(ConfigError, match=r"OUTRIDER_TARGET_MAX_PREFILL_BESIDE: should be greater"):
        load(TargetSettings, [], {**environ, "OUTRIDER_TARGET_MAX_PREFILL_BESIDE": "0"})


def test_origins_name_the_source_of_each_value(file: Path) -> None:
    effective = load_all({("target", "port"): 1}, config=str(file), environ={"OUTRIDER_DRAFT_DTYPE": "float32"})
    assert effective.origins["target", "port"] == "flag"
    assert effective.origins["draft", "dtype"] == "OUTRIDER_DRAFT_DTYPE"
    assert effective.origins["target", "page_size"] == str(file)
    assert ("target", "host") not in effective.origins


@pytest.mark.parametrize(
    ("section", "argv"),
    [
        (TargetSettings, ["--model", "/m", "--page-size", "4", "--num-pages", "9", "--device", "cuda:1"]),
        (DraftSettings, ["--model", "/m", "--support-mass", "0.5"]),
        (DraftSettings, ["--method", "ngram", "--prompt-lookup-min", "1", "--prompt-lookup-max", "3"]),
        (CoordinatorSettings, ["--acceptance-method", "typical", "--disable-logprobs", "--logprobs-mode", "processed"]),
        (CoordinatorSettings, []),
    ],
)
def test_a_section_survives_its_own_flags(section: type[Section], argv: list[str]) -> None:
    settings = load(section, argv, {})
    assert load(section, to_argv(settings), {}) == settings


@pytest.mark.parametrize(
    ("argv", "environ", "content", "said"),
    [
        (["--pge-size", "3"], {}, "", ["--pge-size", "did you mean --page-size"]),
        (["stray"], {}, "", ["'stray'"]),
        ([], {"OUTRIDER_TRGET_MODEL": "x"}, "", ["OUTRIDER_TRGET_MODEL", "did you mean OUTRIDER_TARGET_MODEL"]),
        ([], {"OUTRIDER_ZZZZZZ": "x"}, "", ["OUTRIDER_ZZZZZZ", "docs/configuration.md"]),
        ([], {}, "taget: {model: x}", ["taget", "did you mean target"]),
        ([], {}, "target: {pagesize: 3}", ["target.pagesize", "did you mean target.page_size"]),
        ([], {}, "target: {page-size: 3}", ["target.page-size", "did you mean target.page_size"]),
        ([], {}, "coordinator: {num_speculative_token: 3}", ["did you mean coordinator.num_speculative_tokens"]),
        (
            [],
            {},
            "speculative_config: {modle: x}",
            ["speculative_config.modle", "did you mean speculative_config.model"],
        ),
        ([], {}, "target: 7", ["target"]),
        ([], {}, "[1, 2]", ["OUTRIDER_CONFIG: ", "sections"]),
        ([], {}, "target: {", ["OUTRIDER_CONFIG: ", "not YAML"]),
        (["--page-size", "0", "--model", "m"], {}, "", ["--page-size: ", "greater than or equal to 1", "'0'"]),
        (["--page-size", "many", "--model", "m"], {}, "", ["--page-size: ", "valid integer"]),
        ([], {}, "target: {model: m, page_size: true}", ["settings.yaml: target.page_size: ", "number"]),
        (["--model", "m", "--device", "tpu"], {}, "", ["--device: ", "cpu, cuda or cuda:N", "'tpu'"]),
        (["--model", "m", "--dtype", "int4"], {}, "", ["--dtype: ", "bfloat16"]),
        (["--model", "m", "--num-pages", "1", "--kv-cache-bytes", "2"], {}, "", ["--num-pages: ", "--kv-cache-bytes"]),
        (
            ["--model", "m", "--device", "cuda", "--num-pages", "1", "--gpu-memory-utilization", "0.5"],
            {},
            "",
            ["--num-pages: ", "--gpu-memory-utilization"],
        ),
        (
            ["--model", "m", "--device", "cpu", "--gpu-memory-utilization", "0.5"],
            {},
            "",
            ["--gpu-memory-utilization: ", "cpu"],
        ),
        ([], {}, "", ["--model: must be set"]),
        (["--config", "/nowhere.yaml"], {}, "", ["--config: /nowhere.yaml", "cannot be read"]),
        (["--config", "/no\0where.yaml"], {}, "", ["/no\\x00where.yaml", "cannot be read"]),
        ([], {}, "[" * 6000, ["OUTRIDER_CONFIG: ", "settings.yaml", "nested too deeply"]),
        ([], {}, "{a: " * 6000, ["OUTRIDER_CONFIG: ", "settings.yaml", "nested too deeply"]),
        ([], {}, "- " * 6000, ["OUTRIDER_CONFIG: ", "settings.yaml", "nested too deeply"]),
        (
            [],
            {"OUTRIDER_SPECULATIVE_CONFIG": "[" * 200_000},
            "",
            ["OUTRIDER_SPECULATIVE_CONFIG: ", "nested too deeply"],
        ),
        (
            [],
            {"OUTRIDER_SPECULATIVE_CONFIG": '{"a":' * 200_000},
            "",
            ["OUTRIDER_SPECULATIVE_CONFIG: ", "nested too deeply"],
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, argv: Sequence[str], environ: Mapping[str, str], content: str, said: list[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(TargetSettings, argv, {"OUTRIDER_CONFIG": str(path), **environ})
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("section", "argv", "field"),
    [
        (DraftSettings, ["--method", "draft_model"], "--model"),
        (DraftSettings, ["--prompt-lookup-min", "6"], "--prompt-lookup-min"),
        (DraftSettings, ["--support-mass", "0"], "--support-mass"),
        (CoordinatorSettings, ["--num-speculative-tokens", "-1"], "--num-speculative-tokens"),
        (CoordinatorSettings, ["--posterior-alpha", "-0.1"], "--posterior-alpha"),
        (CoordinatorSettings, ["--posterior-threshold", "nan"], "--posterior-threshold"),
        (CoordinatorSettings, ["--acceptance-method", "hope"], "--acceptance-method"),
        (CoordinatorSettings, ["--port", "70000"], "--port"),
    ],
)
def test_values_have_bounds(section: type[Section], argv: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(section, argv, {})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("section", "argv", "environ", "content", "field"),
    [
        (CoordinatorSettings, ["--port=0x"], {}, "", "--port"),
        (GatewaySettings, ["--port", "-1"], {}, "", "--port"),
        (GatewaySettings, ["--http-port", "-1"], {}, "", "--http-port"),
        (TargetSettings, ["--model", "m"], {"OUTRIDER_TARGET_PAGE_SIZE": "0"}, "", "OUTRIDER_TARGET_PAGE_SIZE"),
        (
            TargetSettings,
            ["--model", "m", "--page-size", "0"],
            {"OUTRIDER_TARGET_PAGE_SIZE": "16"},
            "target: {page_size: 8}",
            "--page-size",
        ),
        (TargetSettings, ["--model", "m"], {}, "target: {page_size: 0}", "FILE: target.page_size"),
        (TargetSettings, ["--model", "m"], {}, "target: {page_sise: 1}", "FILE: target.page_sise"),
        (
            DraftSettings,
            [],
            {"OUTRIDER_SPECULATIVE_CONFIG": '{"draft_tensor_parallel_size": 0}'},
            "",
            "OUTRIDER_SPECULATIVE_CONFIG.draft_tensor_parallel_size",
        ),
        (
            CoordinatorSettings,
            [],
            {},
            "speculative_config: {num_speculative_tokens: -1}",
            "FILE: speculative_config.num_speculative_tokens",
        ),
    ],
)
def test_an_error_names_what_was_typed(
    tmp_path: Path, section: type[Section], argv: list[str], environ: dict[str, str], content: str, field: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(section, argv, {"OUTRIDER_CONFIG": str(path), **environ})
    assert caught.value.field == field.replace("FILE", str(path))


def test_errors_after_the_start_name_what_was_typed() -> None:
    environ = {"OUTRIDER_TARGET_DEVICE": "cuda:9"}
    _, names = load_named(TargetSettings, ["--model", "m", "--health-port", "9"], environ)
    said = {"target.model": "--model", "device": "OUTRIDER_TARGET_DEVICE", "health_port": "--health-port", "x": "x"}
    for field, name in said.items():
        with pytest.raises(ConfigError, match=f"^{name}: is wrong$") as caught, names.in_errors():
            raise ConfigError(field, "is wrong")
        assert caught.value.field == name


def test_settings_of_all_services_name_variables_and_files_but_flags_by_section() -> None:
    for flags, environ, field in (
        ({("target", "page_size"): 0}, {"OUTRIDER_TARGET_PAGE_SIZE": "1"}, "target.page_size"),
        ({}, {"OUTRIDER_TARGET_PAGE_SIZE": "0"}, "OUTRIDER_TARGET_PAGE_SIZE"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_all({("target", "model"): "m", **flags}, environ=environ)
        assert caught.value.field == field


def test_the_draft_method_follows_the_model() -> None:
    assert load(DraftSettings, ["--model", "/m"], {}).method is DraftMethod.DRAFT_MODEL
    assert load(DraftSettings, [], {}).method is DraftMethod.NONE
    assert load(DraftSettings, ["--model", "ngram"], {}).method is DraftMethod.NGRAM


def _speculative(text: str, **others: Any) -> Any:
    return load_all({("target", "model"): "/t"}, speculative_config=text, environ={}, **others).settings


def test_vllms_keys_set_our_settings() -> None:
    settings = _speculative(
        """{"method": "draft_model", "model": "/d", "num_speculative_tokens": 7, "draft_tensor_parallel_size": 2,
        "acceptance_method": "typical_acceptance_sampler", "posterior_threshold": 0.2, "posterior_alpha": 0.5,
        "disable_by_batch_size": 12, "max_model_len": 100, "disable_logprobs": true}"""
    )
    assert (settings.draft.method, settings.draft.model) == (DraftMethod.DRAFT_MODEL, "/d")
    assert settings.draft.max_model_len == 100
    assert (settings.draft.tensor_parallel_size, settings.target.tensor_parallel_size) == (2, 1)
    assert settings.target.max_model_len is None
    coordinator = settings.coordinator
    assert coordinator.num_speculative_tokens == 7
    assert coordinator.acceptance_method is AcceptanceMethod.TYPICAL
    assert (coordinator.posterior_threshold, coordinator.posterior_alpha) == (0.2, 0.5)
    assert coordinator.disable_by_batch_size == 12
    assert coordinator.disable_logprobs


def test_vllms_ngram_with_one_bound() -> None:
    draft = _speculative('{"method": "ngram", "prompt_lookup_max": 3, "max_model_len": null}').draft
    assert (draft.method, draft.prompt_lookup_max, draft.prompt_lookup_min) == (DraftMethod.NGRAM, 3, 3)


def test_vllms_suffix_decoding_sets_our_settings() -> None:
    draft = _speculative(
        """{"method": "suffix", "suffix_decoding_max_tree_depth": 12, "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.3}"""
    ).draft
    assert draft.method is DraftMethod.SUFFIX
    assert draft.suffix_decoding_max_tree_depth == 12
    assert (draft.suffix_decoding_max_spec_factor, draft.suffix_decoding_min_token_prob) == (2.0, 0.3)
    with pytest.raises(ConfigError, match="suffix_decoding_max_cached_tokens"):
        _speculative('{"method": "suffix", "suffix_decoding_max_cached_requests": 10}')


def test_vllms_current_keys_set_our_settings() -> None:
    settings = _speculative(
        """{"model": "/d", "revision": "v2", "enforce_eager": true, "disable_log_stats": true,
        "rejection_sample_method": "standard", "draft_sample_method": "greedy", "disable_mqa_scorer": true,
        "parallel_drafting": false, "quantization": null, "kv_cache_dtype": "auto", "code_revision": "v1"}"""
    )
    assert (settings.draft.model, settings.draft.revision, settings.draft.cuda_graph_memory_mb) == ("/d", "v2", 0)
    assert settings.draft.draft_sample_method is DraftSampleMethod.GREEDY
    assert _speculative('{"model": "/d", "kv_cache_dtype": "fp8"}').draft.kv_cache_dtype == "fp8"
    assert settings.coordinator.rejection_sample_method is RejectionSampleMethod.STANDARD
    by_block = _speculative('{"model": "/d", "rejection_sample_method": "block"}').coordinator
    assert by_block.rejection_sample_method is RejectionSampleMethod.BLOCK
    assert settings.coordinator.acceptance_method is AcceptanceMethod.REJECTION
    assert settings.coordinator.log_interval_s == 0
    assert settings.target.cuda_graph_memory_mb is None


@pytest.mark.parametrize("text", ['{"method": "ngram_gpu"}', '{"model": "[ngram]"}', '{"model": "ngram"}'])
def test_every_name_of_prompt_lookup_is_understood(text: str) -> None:
    assert _speculative(text).draft.method is DraftMethod.NGRAM


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"method": "eagle3"}', "model: is needed by method eagle3"),
        ('{"method": "deepseek_mtp"}', "MTP layers of other models and DSpark are not supported"),
        ('{"quantization": "awq"}', "should be 'none' or 'fp8'"),
        ('{"use_heterogeneous_vocab": true}', "must have the same vocabulary"),
        ('{"rejection_sample_method": "synthetic"}', "should be standard or block, not 'synthetic'"),
        ('{"tensor_parallel_size": 2}', "set draft_tensor_parallel_size"),
        ('{"speculative_token_tree": "[(0,)]"}', "a draft is one sequence of tokens"),
        ('{"enforce_eager": "yes"}', "should be true or false"),
    ],
)
def test_what_vllm_has_and_outrider_has_not_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        _speculative(text)


# The fields of vLLM's own class in the two releases, without those that it fills in itself.
VLLM_0_9 = """num_speculative_tokens model method acceptance_method draft_tensor_parallel_size disable_logprobs
    quantization max_model_len revision code_revision disable_mqa_scorer disable_by_batch_size prompt_lookup_max
    prompt_lookup_min posterior_threshold posterior_alpha speculative_token_tree enable_chunked_prefill
    disable_log_stats"""
VLLM_0_33 = """enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size
    quantization moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision
    index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes
    draft_lm_head_quantization use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min
    parallel_drafting num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config
    rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
    draft_sample_method dspark_draft_topk xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k"""


@pytest.mark.parametrize("key", sorted({*VLLM_0_9.split(), *VLLM_0_33.split()}))
def test_every_key_of_vllm_is_known(key: str) -> None:
    for value in ("null", "[3]"):
        try:
            _speculative(f'{{"{key}": {value}}}')
        except ConfigError as error:
            assert "is not a setting" not in str(error)
            assert value != "null"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "speculative_config"),
        ("[1]", "speculative_config"),
        ('{"num_spec_tokens": 3}', "speculative_config.num_spec_tokens"),
        ('{"draft_tensor_parallel_size": 2}', "speculative_config.draft_tensor_parallel_size"),
        ('{"draft_tensor_parallel_size": "two"}', "speculative_config.draft_tensor_parallel_size"),
        ('{"num_speculative_tokens": -1}', "speculative_config.num_speculative_tokens"),
        ('{"method": "dspark"}', "speculative_config.method"),
    ],
)
def test_a_bad_speculative_config_is_named(text: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _speculative(text)
    assert caught.value.field == field


@pytest.mark.parametrize("key", ["speculative_model", "modle"])
def test_a_key_that_is_offered_is_suggested(key: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean speculative_config\.model\?"):
        load_all({}, speculative_config=json.dumps({key: "x"}), environ={})


def test_the_same_setting_twice_in_one_source_must_agree(file: Path) -> None:
    with file.open("a") as stream:
        stream.write("\n        speculative_config: {num_speculative_tokens: 5}\n")
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        load_all({}, config=str(file), environ={})
    # A stronger source simply wins.
    file.write_text("target: {model: /t}\nspeculative_config: {num_speculative_tokens: 5}\n")
    flags = {("coordinator", "num_speculative_tokens"): 2}
    assert load_all(flags, config=str(file), environ={}).settings.coordinator.num_speculative_tokens == 2


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(CoordinatorSettings, ["--help"], {})
    text = capsys.readouterr().out
    for key in CoordinatorSettings.model_fields.keys() - {"num_processes"}:  # of outrider serve
        assert f"--{key.replace('_', '-')}" in text


def test_settings_are_frozen() -> None:
    settings = load(CoordinatorSettings, [], {})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


def test_a_file_without_pyyaml_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        ConfigError, match=r"without PyYAML: pip install pyyaml, or pip install -e \"\.\[coordinator\]\" in a clone"
    ):
        read_file("/settings.yaml")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--method", "ngram", "--model", "/d"], "--model: is /d, and method ngram drafts without a model"),
        (["--method", "suffix", "--model", "/d"], "--model: is /d, and method suffix drafts without a model"),
        (["--method", "ngram", "--revision", "v1"], "--revision: is set, and there is no draft model"),
        (["--revision", "v1"], "--revision: is set, and there is no draft model"),
        (
            ["--method", "suffix", "--attention-window", "9"],
            "--attention-window: is set, and only method draft_model has one, not suffix",
        ),
        (
            ["--method", "eagle3", "--model", "/d", "--attention-window", "9"],
            "--attention-window: is set, and only method draft_model has one, not eagle3",
        ),
    ],
)
def test_a_model_that_nothing_would_use_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(DraftSettings, argv, {})


@pytest.mark.parametrize("method", ["ngram", "[ngram]", "suffix"])
def test_vllms_model_that_is_called_like_its_method_is_that_method(method: str) -> None:
    draft = load(DraftSettings, ["--method", method, "--model", method.strip("[]")], {})
    assert (draft.method.value, draft.model) == (method.strip("[]"), None)
    assert load(DraftSettings, ["--method", "none", "--model", "/d"], {}).method is DraftMethod.NONE


def test_addresses_have_a_form() -> None:
    for flags, section in ((["--coordinator"], GatewaySettings), (["--target-address"], CoordinatorSettings)):
        for address in ("foo", "a:0", "a:70000", "http://a:1", "a:1,b"):
            with pytest.raises(ConfigError, match=rf"^{flags[0]}: should be host:port"):
                load(section, [*flags, address], {})
        load(section, [*flags, "a:1,unix:/b"], {})


def test_a_setting_that_an_error_mentions_is_named_as_typed_too() -> None:
    environ = {"OUTRIDER_TARGET_NUM_PAGES": "1"}
    with pytest.raises(ConfigError, match=r"^OUTRIDER_TARGET_NUM_PAGES: is set together with --bytes; one"):
        load_all(
            {("target", "model"): "m", ("target", "kv_cache_bytes"): 2},
            environ=environ,
            flag_names=FlagNames({("target", "kv_cache_bytes"): "--bytes"}),
        )


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (TargetSettings, ["--host", "--health-host", "--metrics-host"]),
        (DraftSettings, ["--host", "--health-host", "--metrics-host"]),
        (CoordinatorSettings, ["--host", "--health-host", "--metrics-host"]),
        (GatewaySettings, ["--host", "--metrics-host"]),
    ],
)
@pytest.mark.parametrize(("given", "host"), [("[::]", "::"), ("::", "::"), ("[::1]", "::1"), ("::1", "::1")])
def test_every_spelling_of_an_ipv6_host_is_one(kind: type[Any], flags: list[str], given: str, host: str) -> None:
    for flag in flags:
        settings = load(kind, [flag, given, *NEEDED.get(kind, ())], {})
        assert getattr(settings, flag.removeprefix("--").replace("-", "_")) == host
        with pytest.raises(ConfigError, match="should be a host alone"):
            load(kind, [flag, f"{given}:80:x", *NEEDED.get(kind, ())], {})


NEEDED: dict[type[Any], tuple[str, ...]] = {
    TargetSettings: ("--model", "/models/target"),
    DraftSettings: ("--model", "/models/draft"),
}


@pytest.mark.parametrize(("key", "annotation", "name"), [
    ("num_pages", int | None, "INTEGER"),
    ("num_pages", Annotated[int | None, "positive"], "INTEGER"),
    ("support_mass", float, "FLOAT"),
    ("host", str | None, "TEXT"),
    ("trace_file", str | None, "FILE"),
    ("target_address", str | None, "ADDRESS"),
    ("draft_length", Literal["auto", "fixed"] | None, "auto|fixed"),
])  # fmt: skip
def test_the_placeholder_of_a_value_is_its_type_or_its_few_values(key: str, annotation: Any, name: str) -> None:
    assert value_name(key, annotation) == name
