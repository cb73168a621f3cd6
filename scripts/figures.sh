#!/usr/bin/env bash
# The project's figures on one GPU, from nothing: scripts/figures.sh [FOLDER] [PART...], all parts unless some are named:
# serve users sampled interference engine shapes kernels rpc step tracing. Writes FOLDER/benchmarks/results/*.json, goes on when a part
# fails, and ends with a line for each result; its exit status says whether all parts worked.
# `python -m outrider.benchmarks.report --add FOLDER` then takes the results into the checkout, with tables and plot.
# Pairs are synthetic (weights made on the device), so nothing is downloaded and nothing large is written.
# A run without a GPU, to see that everything works:
#   DEVICE=cpu DTYPE=float32 TARGET=tiny DRAFT=tiny-draft CONTEXT=256 PREFILL_LEN=512 MAX_MODEL_LEN=2048 PAGES=2000 \
#   LENGTHS=2 USERS="1 4" BATCHES="1 2" RUNS=1 SAMPLES=3 GPU_NAME=cpu scripts/figures.sh /tmp/figures
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-figures} parts=" ${*:2} "
mkdir -p "$folder" && cd "$folder" || exit 1
export PYTHONPATH=$root:$root/draft_service:$root/target_service:$root/coordinator${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
name=${GPU_NAME:-h200} target=${TARGET:-8B} draft=${DRAFT:-1B}
where=(--device "${DEVICE:-cuda}" --dtype "${DTYPE:-bfloat16}")
made=(--load-format synthetic)
samples=(--samples "${SAMPLES:-20}")
max_model_len=${MAX_MODEL_LEN:-12288} pages=${PAGES:-12000} runs=${RUNS:-3}
address=127.0.0.1:${PORT:-50950}
pair=pair-$target-$draft failed=()

known=" serve users sampled interference engine shapes kernels rpc step tracing "
for part in ${*:2}; do
	[[ $known == *" $part "* ]] || { echo "no part is called $part; there are:$known"; exit 2; }
done
wanted() { [[ $parts == "  " || $parts == *" $1 "* ]]; }
heading() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }
fail() { # WHAT LOG
	echo "FAILED: $1"
	tail -5 "$2"
	failed+=("$1")
}
outrider() { timeout "${LIMIT_S:-240}" "$python" -m outrider.cli "$@" 2>stderr.log || fail "outrider $*" stderr.log; }

start_services() { # MODE MAX_RUNNING: draft lengths auto or fixed; succeeds once they are ready
	"$python" -m outrider.cli serve "$pair/target" --draft-model "$pair/draft" "${where[@]}" "${made[@]}" \
		--port "${address##*:}" --max-model-len "$max_model_len" --set target.num_pages="$pages" \
		--set draft.num_pages="$pages" --set coordinator.max_running_requests="$2" \
		--set coordinator.draft_length="$1" >serve.log 2>&1 &
	server=$!
	trap stop_services EXIT
	local deadline=$((SECONDS + ${START_LIMIT_S:-600}))
	until grep -q "is ready at" serve.log; do
		if ! kill -0 "$server" 2>/dev/null || ((SECONDS > deadline)); then
			fail "outrider serve" serve.log
			stop_services
			return 1
		fi
		sleep 0.5
	done
	grep "is ready at" serve.log
}

stop_services() {
	trap - EXIT
	kill "$server" 2>/dev/null
	for _ in {1..60}; do
		kill -0 "$server" 2>/dev/null || break
		sleep 0.5
	done
	kill -9 "$server" 2>/dev/null
	wait "$server" 2>/dev/null
}

served() { # NAME K USERS RUNS PROMPTS
	outrider bench serve --address "$address" -k "$2" --baseline --runs "$4" --num-prompts "$5" --num-warmups "$3" \
		--input-len 128 --output-len 256 --max-concurrency "$3" "${where[@]}" "${@:6}" --save "$1"
}

measure_services() {
	for length in ${LENGTHS:-2 3 4 5}; do
		wanted serve && heading "one user, K = $length" && served "$name-${target,,}-${draft,,}-k$length" "$length" 1 "$runs" 4
	done
	for sampling in "0 1 0" "0.6 0.9 0" "0.7 0.8 20"; do
		read -r temperature top_p top_k <<<"$sampling"
		wanted sampled && heading "one user, K = 4, T = $temperature, top-p $top_p, top-k $top_k" &&
			served "$name-${target,,}-${draft,,}-k4-t$temperature-p$top_p-k$top_k" 4 1 1 4 \
				--temperature "$temperature" --top-p "$top_p" --top-k "$top_k"
	done
	for length in 0 4; do
		wanted interference && heading "long prompts beside running requests, K = $length" &&
			outrider bench interference --address "$address" -k "$length" --prefill-len "${PREFILL_LEN:-8192}" \
				--runs "$runs" "${where[@]}" --save "interference-$name-k$length"
	done
}

measure_users() { # chosen draft lengths
	for users in ${USERS:-1 8 32 64 128 256}; do
		heading "$users users, chosen draft lengths"
		outrider bench serve --address "$address" --baseline --runs "${USER_RUNS:-2}" --num-prompts $((users > 3 ? users : 3)) \
			--num-warmups "$users" --input-len 128 --output-len 256 --max-concurrency "$users" \
			--client-processes "${CLIENT_PROCESSES:-8}" "${where[@]}" --save "$name-${target,,}-${draft,,}-users$users"
	done
}

measure_shapes() { measure_engine target "$@" --draft-length 0; } # NAME, then further flags

measure_engine() { # ROLE NAME, then further flags
	local batches=()
	for batch in ${BATCHES:-1 8 32}; do batches+=(--batch-size "$batch"); done
	outrider bench engine "$pair/$1" "${where[@]}" "${made[@]}" "${samples[@]}" --context "${CONTEXT:-1024}" "${batches[@]}" \
		"${@:3}" --save "$2"
}

test -f "$pair/synthetic_pair.json" || "$python" "$root/tools/make_synthetic_pair.py" "$target" "$draft" \
	--acceptance "${ACCEPTANCE:-0.81}" --out "$pair" --no-weights >pair.log 2>&1 || fail "make_synthetic_pair.py" pair.log

if wanted users; then
	heading "three processes, chosen draft lengths"
	if start_services auto 256; then
		measure_users
		stop_services
	fi
fi
if wanted serve || wanted sampled || wanted interference; then
	heading "three processes, fixed draft lengths"
	if start_services fixed 64; then
		measure_services
		stop_services
	fi
fi
if wanted engine; then
	heading "the target's forward"
	measure_engine target "engine-$name-${target,,}" --num-tokens 1 --num-tokens 5 --num-tokens 8 --draft-length 1
	heading "the draft's loop"
	measure_engine draft "engine-$name-${draft,,}" --num-tokens 1 --num-tokens 5 --draft-length 2 --draft-length 4 \
		--draft-length 8
fi
if wanted shapes; then
	heading "forwards of a few rows, and one row or token more"
	CONTEXT=${CONTEXT:-1024} BATCHES="${BATCHES:-1 8 32 33}" measure_shapes "engine-$name-${target,,}-shapes" --num-tokens 1 --num-tokens 5 \
		--num-tokens 8 --num-tokens 9
	heading "forwards of many rows"
	CONTEXT=${CONTEXT:-256} BATCHES="${BATCHES:-64 65 128 256}" measure_shapes "engine-$name-${target,,}-many" --num-tokens 1 --num-tokens 4
	heading "the draft's loop, greedy and sampled"
	CONTEXT=${CONTEXT:-256} BATCHES="${BATCHES:-1 8 32 64 128 256}" measure_engine draft "engine-$name-${draft,,}-sampled" --num-tokens 1 \
		--most-tokens 1 --draft-length 4 --draft-length 16 --sampling '{"temperature": 0}' \
		--sampling '{"temperature": 0.6, "top_p": 0.9}' --sampling '{"temperature": 0.7, "top_p": 0.8, "top_k": 20}'
fi
wanted kernels && heading "kernels" && outrider bench kernels "${where[@]}" "${samples[@]}" --save "kernels-$name"
wanted rpc && heading "the wire" && outrider bench rpc --samples "${WIRE_SAMPLES:-200}" --save "rpc-$name-host"
wanted step && heading "a step without its forwards" &&
	outrider bench step --samples "${WIRE_SAMPLES:-300}" --save "step-$name-host"
wanted tracing && heading "tracing" && outrider bench tracing --save "tracing-$name-host"

heading "results"
"$python" -m outrider.benchmarks.report --short || failed+=("outrider.benchmarks.report")
((${#failed[@]} == 0)) && exit 0
printf 'FAILED: %s\n' "${failed[@]}"
exit 1
