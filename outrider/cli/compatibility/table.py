"""Flags of ``vllm serve`` that are no options here: what they ask for anyway, and what is not offered.

The flags are those of vLLM 0.9, 0.18, 0.26 and 0.33. Flags that mean the same here are names of the option itself.
Each table has a reason and the flags that it holds for; the reasons end a sentence that begins with the flag.
"""

from __future__ import annotations

ALWAYS_ON = {
    "the next step is always prepared while one runs": "--async-scheduling --multi-step-stream-outputs",
    "long prompts are always cut into chunks; --max-num-batched-tokens bounds them": "--enable-chunked-prefill",
    "progress is shown on a terminal": "--use-tqdm-on-load",
    "usage always has prompt_tokens_details": "--enable-prompt-tokens-details",
    "responses always have x-request-id": "--enable-request-id-headers",
    "pages are always taken as requests grow": "--use-v2-block-manager",
    "processes of other hosts run by themselves": "--aggregate-engine-logging",
    "each service is a process of its own": "--disable-frontend-multiprocessing",
    "there are no such pages": "--disable-fastapi-docs",
    "requests are not logged one by one": "--disable-log-requests --disable-uvicorn-access-log --enable-log-deltas",
    "tools reach the chat template whenever they are sent": "--expand-tools-even-if-tool-choice-none",
    "tool calls and reasoning are parsed where the model writes them": "--enable-auto-tool-choice --enable-reasoning",
    "a request that does not fit waits": "--scheduler-reserve-full-isl",
    "gRPC is always served; its port is --port": "--grpc",
    "only text is read": "--language-model-only --skip-mm-profiling --disable-mm-preprocessor-cache",
    "it concerns kernels that are not used here": (
        "--disable-cascade-attn --enable-flashinfer-autotune --enable-flash-late-interaction --swa-bounded-replay"
        " --disable-nccl-for-dp-synchronization --enable-bf16x3-router-gemm --cohere-is-reasoning-model"
    ),
}
"""Switches of what is so anyway: on is passed over, off is refused."""

DEFAULTS = {
    "it is the default": (
        "--no-enforce-eager --no-disable-log-stats --no-allow-credentials --no-disable-custom-all-reduce"
        " --no-enable-expert-parallel --no-calculate-kv-scales"
    ),
    "it is the model's own length": "--max-model-len=-1|auto",
    "safetensors are read": "--load-format=auto|hf",
}
"""Flags without effect here: switches, and values of flags that are options here."""

SETTINGS = {
    "--allowed-headers": "gateway.allowed_headers",
    "--allowed-methods": "gateway.allowed_methods",
    "--allowed-origins": "gateway.allowed_origins",
    "--api-server-count": "gateway.num_processes",
    "-asc": "gateway.num_processes",
    "--logprobs-mode": "coordinator.logprobs_mode",
    "--max-cudagraph-capture-size": "target.cuda_graph_max_tokens draft.cuda_graph_max_tokens",
    "--num-gpu-blocks-override": "target.num_pages",
    "--reasoning-parser": "gateway.reasoning_parser",
    "--root-path": "gateway.root_path",
    "--scheduling-policy": "coordinator.scheduling_policy",
    "--shutdown-timeout": "coordinator.drain_grace_s",
    "--ssl-ca-certs": "gateway.tls_client_ca_file",
    "--ssl-certfile": "gateway.tls_cert_file",
    "--ssl-keyfile": "gateway.tls_key_file",
    "--tool-call-parser": "gateway.tool_call_parser",
}
"""Flags that set what ``--set`` sets."""

SETTING_SWITCHES = {
    "--allow-credentials": "gateway.allow_credentials=true",
    "--calculate-kv-scales": "target.kv_cache_scales=measured draft.kv_cache_scales=measured",
    "--enable-expert-parallel": "target.enable_expert_parallel=true",
    "-ep": "target.enable_expert_parallel=true",
    "--disable-custom-all-reduce": "target.one_shot_all_reduce=false draft.one_shot_all_reduce=false",
}
"""The same for switches."""

_NO_QUANTIZATION = "FP8 scales are read from the checkpoint, or made by --quantization fp8"
_ONE_ENGINE = "one target and one draft are served; for more, start `outrider target` on each host"
_NO_LORA = "adapters are not served: merge the adapter into the model"
_TEXT_ONLY = "models of text alone are served"
_TOOLS_IN_TEMPLATE = "tools reach the chat template whenever they are sent"
_OTHER_PARSERS = "the parsers are those of --tool-call-parser and --reasoning-parser"
_NO_OFFLOAD = "weights and KV cache stay on the device"
_NO_CODE = "code of a model's repository is never run"
_NO_GRAMMAR = "grammars are compiled by llguidance, without options"
_NO_EXPERTS = "experts are divided over the ranks of tensor parallelism: --enable-expert-parallel"
_NO_PLUGINS = "other code is not loaded; a proposer of your own is --method module:Class of `outrider draft`"
_NO_MAMBA = "recurrent states have the model's type and pages' snapshots: see state_snapshot_interval (--set)"
_SEVERAL_HOSTS = "start a service's processes on several hosts by torchrun: see docs/operations.md"
_EDIT_CONFIG = "edit the model's config.json"
_OTHER_METRICS = "see docs/metrics.md for the metrics that there are"
_OTHER_LOGS = "logs are set by --log-level and -v"
_GRAPHS = "CUDA graphs follow --max-num-seqs and -k: see cuda_graph_max_tokens (--set)"
_KERNELS = "there is one kernel for each operation"
_DOWNLOAD = "safetensors are mapped into memory"
_PROXY = "put a proxy before the gateway"
_GENERATES = "models that generate text are served"

ALWAYS_OFF = {
    _NO_QUANTIZATION: "--allow-deprecated-quantization",
    _ONE_ENGINE: (
        "--data-parallel-external-lb -dpe --data-parallel-hybrid-lb -dph --data-parallel-multi-port-external-lb -dpm"
        " --headless"
    ),
    _NO_LORA: (
        "--enable-lora --enable-lora-bias --enable-tower-connector-lora --fully-sharded-loras --specialize-active-lora"
        " --enable-mixed-moe-lora-format --enable-moe-shared-loras --enable-prompt-adapter"
    ),
    _TEXT_ONLY: (
        "--disable-chunked-mm-input --enable-mm-embeds --enable-multimodal-encoder-data-parallel --mm-encoder-only"
        " --interleave-mm-strings --mm-device-do-normalize --trust-request-mm-kwargs"
    ),
    _TOOLS_IN_TEMPLATE: "--exclude-tools-when-tool-choice-none",
    _NO_CODE: "--trust-remote-code",
    _NO_GRAMMAR: (
        "--guided-decoding-disable-additional-properties --guided-decoding-disable-any-whitespace"
        " --guided-decoding-disable-fallback"
    ),
    _NO_EXPERTS: (
        "--enable-eplb --enable-ep-weight-filter --enable-elastic-ep --enable-hc-sp"
        " --enable-return-routed-experts --eplb-log-balancedness --enable-dbo --dcp-q-replicate"
    ),
    _NO_MAMBA: (
        "--enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint --use-replayssm"
        " --disable-hybrid-kv-cache-manager --kv-sharing-fast-prefill"
    ),
    _OTHER_METRICS: (
        "--cudagraph-metrics --enable-mfu-metrics --kv-cache-metrics --enable-server-load-tracking"
        " --enable-per-request-metrics"
    ),
    _OTHER_LOGS: (
        "--enable-log-requests --enable-log-outputs --log-error-stack --enable-logging-iteration-details"
        " --jit-monitor-verbose"
    ),
    "`outrider trace` and docs/tracing.md show where the time of a request goes": (
        "--enable-layerwise-nvtx-tracing --ray-workers-use-nsight --enable-trace-replay"
    ),
    "a model's sliding window is part of the model": "--disable-sliding-window",
    "a service keeps its memory until it ends": (
        "--enable-sleep-mode --sleep-mode-offload-cudagraph --enable-nccl-comm-suspend --enable-cumem-allocator"
    ),
    "the coordinator needs the tokenizer; send prompt_token_ids to pass it by": "--skip-tokenizer-init",
    "prompts are texts or token ids": "--enable-prompt-embeds",
    "send stream_options.include_usage in the request": "--enable-force-include-usage",
    "send return_tokens_as_token_ids in the request": "--return-tokens-as-token-ids",
    "name a file by --chat-template; a request may name one of its templates": "--trust-request-chat-template",
    "start the gateway again to read other certificates": "--enable-ssl-refresh",
    "there is no such endpoint: see docs/http.md": (
        "--enable-tokenizer-info-endpoint --enable-offline-docs --tokens-only --enable-scale-out"
    ),
    "lost services are found and started again anyway": "--enable-fault-tolerance",
    "use --set target.num_pinned_cpus=N": "--numa-bind",
    "the next step is always prepared while one runs": "--disable-async-output-proc",
    "draws are made in float32": "--use-fp64-gumbel",
    "responses hold token ids and logprobs": "--return-sampling-mask",
    "settings are checked at the start anyway": "--fail-on-environ-validation",
    "see max_mixed_prefill_tokens (--set)": "--long-prefill-token-threshold-adaptive",
    _KERNELS: "--monokernel --enable-batch-sharded-sampling --enable-shm-tensor-arena",
}
"""Switches of what is not offered: on is refused, off is passed over."""

VALUES = {
    # Without effect at any value.
    "--log-level sets the level of all services": "--uvicorn-log-level=*",
    "requests are not logged one by one": "--disable-access-log-for-endpoints=* --max-log-len=*",
    "--enforce-eager turns CUDA graphs off; nothing else is compiled by level": "--optimization-level=* -O=*",
    "prefixes are always hashed by BLAKE2b": "--prefix-caching-hash-algo=*",
    "gateways tokenize; --api-server-count N starts several": (
        "--renderer-num-workers=* --tokenizer-pool-size=* --tokenizer-pool-type=* --tokenizer-pool-extra-config=*"
    ),
    # As here at some values.
    _NO_QUANTIZATION: "--quantization-config",
    "all layers have one type of keys and values: see --kv-cache-dtype": (
        "--kv-cache-dtype-skip-layers --override-attention-dtype"
    ),
    "a model is split by --tensor-parallel-size": (
        "--pipeline-parallel-size=1 -pp=1 --decode-context-parallel-size=1 -dcp=1 --prefill-context-parallel-size=1"
        " -pcp=1 --cp-kv-cache-interleave-size=1 --dcp-kv-cache-interleave-size=1 --dcp-comm-backend"
    ),
    _ONE_ENGINE: (
        "--data-parallel-size=1 -dp=1 --data-parallel-size-local=1 -dpl=1 --data-parallel-rank=0 -dpn=0"
        " --data-parallel-start-rank=0 -dpr=0 --data-parallel-address -dpa --data-parallel-rpc-port -dpp"
        " --data-parallel-backend=mp -dpb=mp --data-parallel-supervisor-port --dp-sync-interval"
        " --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold"
    ),
    _SEVERAL_HOSTS: "--nnodes=1 -n=1 --node-rank=0 -r=0 --master-addr --master-port",
    "processes of one model are started by the service itself, or by torchrun": (
        "--distributed-executor-backend=mp|uni --distributed-timeout-seconds --cpu-distributed-timeout-seconds"
    ),
    "set CUDA_VISIBLE_DEVICES, or --device cuda:N": "--device-ids",
    "each request has a seed of its own": "--seed=0|None",
    _GENERATES: (
        "--task=auto|generate --runner=auto|generate --convert=auto|none --pooler-config --override-pooler-config"
    ),
    "models are read in the Hugging Face layout": "--config-format=auto|hf --hf-config-path",
    "tokenizers are read from tokenizer.json": "--tokenizer-mode=auto|hf|fast",
    "answers are the assistant's": "--response-role=assistant",
    "content is given to the template in the form that it reads": "--chat-template-content-format=auto",
    "each token is sent when it is there, within coordinator.max_stream_messages_per_s": (
        "--stream-interval=1 --sse-keep-alive-interval=0"
    ),
    "requests run in the order of their arrival, or by --scheduling-policy": (
        "--scheduler-cls --scheduler-delay-factor=0.0|0"
    ),
    "clients need a certificate exactly if --ssl-ca-certs is given": "--ssl-cert-reqs=2",
    "the ciphers are Python's": "--ssl-ciphers",
    "responses have no fingerprint": "--fingerprint-mode=none --fingerprint-value",
    "safetensors are read; see --load-format": (
        "--safetensors-load-strategy=lazy --ignore-patterns --pt-load-map-location=cpu"
    ),
    _DOWNLOAD: (
        "--model-loader-extra-config={} --safetensors-prefetch-num-threads --safetensors-prefetch-block-size"
        " --max-parallel-loading-workers"
    ),
    _NO_OFFLOAD: (
        "--cpu-offload-gb=0 --cpu-offload-params --swap-space=0|4 --offload-backend=auto --offload-group-size=0"
        " --offload-num-in-group=1 --offload-prefetch-step --offload-params --kv-offloading-size --preemption-mode"
        " --kv-offloading-backend=native"
    ),
    "the draft length is -k, --num-speculative-tokens": "--num-lookahead-slots=0",
    "the next step is always prepared while one runs": "--num-scheduler-steps=1 --prefill-schedule-interval=1",
    "see max_mixed_prefill_tokens (--set)": (
        "--max-num-partial-prefills=1 --max-long-partial-prefills=1 --long-prefill-token-threshold=0"
        " --max-num-scheduled-tokens"
    ),
    "--max-num-seqs bounds running requests, --set coordinator.max_queue=N waiting ones": (
        "--max-num-queued-reqs --max-num-queued-tokens --max-num-active-seqs"
    ),
    "pages are taken as requests grow; see docs/operations.md": (
        "--watermark=0|0.0 --watermark-config --prefix-cache-retention-interval=0 --prefix-match-unit"
    ),
    _GRAPHS: "--compilation-config -cc --cudagraph-capture-sizes --cuda-graph-sizes",
    "CUDA graphs cover any length: see cuda_graph_max_tokens (--set)": "--max-seq-len-to-capture",
    _KERNELS: (
        "--attention-backend=auto --attention-config -ac --kernel-config --ir-op-priority --linear-backend=auto"
        " --sparse-indexer-topk-backend=auto --gdn-prefill-backend --kda-prefill-backend --kda-decode-backend"
    ),
    _EDIT_CONFIG: "--hf-overrides={} --rope-scaling={} --rope-theta --model-class-overrides={}",
    "give the parameters in requests, or in the model's generation_config.json": "--override-generation-config={}",
    "send chat_template_kwargs in the request": "--default-chat-template-kwargs={} --reasoning-effort-map={}",
    "set HF_HUB_CACHE to the folder": "--download-dir",
    "set HF_TOKEN, which other users of this host cannot read": "--hf-token",
    _NO_CODE: "--code-revision",
    _NO_LORA: (
        "--lora-modules --lora-dtype=auto --lora-extra-vocab-size --lora-target-modules --long-lora-scaling-factors"
        " --max-cpu-loras --max-lora-rank --max-loras --max-lora-cls-labels --default-mm-loras --prompt-adapters"
        " --max-prompt-adapters --max-prompt-adapter-token --qlora-adapter-name-or-path"
    ),
    _TEXT_ONLY: (
        "--allowed-local-media-path --allowed-media-domains --limit-mm-per-prompt={} --media-io-kwargs={}"
        " --mm-processor-kwargs={} --mm-processor-cache-gb=0 --mm-processor-cache-type --mm-processor-device=auto"
        " --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend"
        " --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-tensor-ipc"
        " --mm-encoder-fp8-scale-save-margin --mm-ipc-gpu-memory-gb --video-pruning-rate --video-pruning-method"
        " --diffusion-config -dc --cohere-format --anthropic-disabled-thinking-effort=auto"
    ),
    _OTHER_PARSERS: (
        "--tool-parser-plugin --tool-server --tool-strict-level --reasoning-parser-plugin --reasoning-config"
    ),
    _NO_GRAMMAR: "--guided-decoding-backend=auto --structured-outputs-config={}",
    _NO_EXPERTS: (
        "--all2all-backend --eplb-config --eplb-step-interval --eplb-window-size --expert-placement-strategy=linear"
        " --moe-backend=auto --num-redundant-experts=0 --elastic-ep-max-dp-size --ubatch-size=0"
        " --dbo-decode-token-threshold --dbo-prefill-token-threshold"
    ),
    _NO_MAMBA: (
        "--mamba-backend --mamba-block-size --mamba-cache-dtype=auto --mamba-cache-mode=none"
        " --mamba-ssm-cache-dtype=auto --mamba-cache-philox-rounds=0 --mamba-ssu-algorithm --replayssm-buffer-len"
        " --engram-config"
    ),
    _NO_PLUGINS: (
        "--additional-config={} --io-processor-plugin --logits-processors --logits-processor-pattern --worker-cls=auto"
        " --worker-extension-cls --override-neuron-config={}"
    ),
    "KV caches stay with their service": (
        "--kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config --weight-transfer-config"
        " --aux-output-config"
    ),
    _OTHER_METRICS: (
        "--custom-histogram-buckets --kv-cache-metrics-sample --show-hidden-metrics-for-version"
        " --per-request-spec-decode-metrics=none"
    ),
    _OTHER_LOGS: "--log-config-file --logging-config --jit-monitor-mode",
    "set OTEL_EXPORTER_OTLP_ENDPOINT": "--otlp-traces-endpoint --collect-detailed-traces",
    "`outrider bench engine` measures a model": "--profiler-config",
    "a service keeps its memory until it ends": "--sleep-mode-backend --sleep-preserve-parameter-names",
    "a service that hangs is found by its heartbeats: see docs/faults.md": "--watchdog-config --fault-tolerance-config",
    "lengths of drafts follow the load: see draft_length (--set)": "--performance-mode=balanced",
    "use --set target.num_pinned_cpus=N": "--numa-bind-nodes --numa-bind-cpus",
    "the gateway listens on TCP": "--uds",
    "gRPC is always served; its port is --port": "--grpc-port",
    "headers have fixed bounds": "--h11-max-header-count --h11-max-incomplete-event-size",
    _PROXY: "--middleware",
    "use --draft-model, or --speculative-config": "--speculative-model",
}
"""Flags with a value: ``flag=a|b`` names the values that are passed over, ``*`` any; others are refused."""
