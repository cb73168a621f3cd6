#!/usr/bin/env bash
# The project's figures on one GPU, from nothing: scripts/figures.sh [FOLDER] [PART...], all parts unless some are named:
# serve users interference engine kernels rpc step. Writes FOLDER/benchmarks/results/*.json.
# Pairs are synthetic (weights made on the device), so nothing is downloaded and nothing large is written.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-figures} parts=" ${*:2} "
mkdir -p "$folder" && cd "$folder"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
name=${GPU_NAME:-h200}
gpu=(--device cuda --dtype bfloat16)
made=(--load-format synthetic)
address=127.0.0.1:${PORT:-50950}

outrider() { timeout "${LIMIT_S:-240}" "$python" -m outrider.cli "$@" 2>stderr.log || { echo "FAILED: outrider $*"; tail -3 stderr.log; }; }
wanted() { [[ $parts == "  " || $parts == *" $1 "* ]]; }
heading() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

test -d pair || "$python" "$root/tools/make_synthetic_pair.py" 8B 1B --acceptance 0.75 --out pair --no-weights >/dev/null

start_services() {
	"$python" -m outrider.cli serve pair/target --draft-model pair/draft "${gpu[@]}" "${made[@]}" --port "${address##*:}" \
		--max-model-len 12288 --set target.num_pages=12000 --set draft.num_pages=12000 \
		--set coordinator.max_running_requests=64 >serve.log 2>&1 &
	server=$!
	trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null' EXIT
	until grep -q "is ready at" serve.log || ! kill -0 "$server" 2>/dev/null; do sleep 0.5; done
	grep "is ready at" serve.log || { echo "FAILED: outrider serve"; tail -20 serve.log; exit 1; }
}

served() { # NAME K USERS RUNS PROMPTS
	outrider bench serve --address "$address" -k "$2" --baseline --runs "$4" --num-prompts "$5" --num-warmups "$3" \
		--input-len 128 --output-len 256 --max-concurrency "$3" --device cuda --dtype bfloat16 --save "$1"
}

if wanted serve || wanted users || wanted interference; then
	heading "three processes"
	start_services
	for length in ${LENGTHS:-2 3 4 5}; do
		wanted serve && heading "one user, K = $length" && served "$name-8b-1b-k$length" "$length" 1 3 4
	done
	for users in ${USERS:-8 32 64}; do
		wanted users && heading "$users users, K = 4" && served "$name-8b-1b-k4-users$users" 4 "$users" 1 "$users"
	done
	for length in 0 4; do
		wanted interference && heading "long prompts beside running requests, K = $length" &&
			outrider bench interference --address "$address" -k "$length" --device cuda --dtype bfloat16 \
				--save "interference-$name-k$length"
	done
	kill "$server" && wait "$server"
	trap - EXIT
fi
if wanted engine; then
	heading "8B forward"
	outrider bench engine pair/target "${gpu[@]}" "${made[@]}" --context 1024 --num-tokens 1 --num-tokens 5 --num-tokens 8 \
		--batch-size 1 --batch-size 8 --batch-size 32 --draft-length 1 --save "engine-$name-8b"
	heading "1B draft loop"
	outrider bench engine pair/draft "${gpu[@]}" "${made[@]}" --context 1024 --num-tokens 1 --num-tokens 5 \
		--batch-size 1 --batch-size 8 --batch-size 32 --draft-length 2 --draft-length 4 --draft-length 8 \
		--save "engine-$name-1b"
fi
wanted kernels && heading "kernels" && outrider bench kernels "${gpu[@]}" --save "kernels-$name"
wanted rpc && heading "the wire" && outrider bench rpc --samples 200 --save "rpc-$name-host"
wanted step && heading "a step without its forwards" && outrider bench step --save "step-$name-host"
heading "done"
