#!/usr/bin/env bash
# Every figure of the project on one GPU, from nothing: scripts/figures.sh [FOLDER]. Writes FOLDER/benchmarks/results/*.json.
# Pairs are synthetic (weights made on the device), so nothing is downloaded and nothing large is written.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-figures}" && cd "${1:-figures}"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
gpu=(--device cuda --dtype bfloat16)
made=(--load-format synthetic)
address=127.0.0.1:${PORT:-50950}

outrider() { timeout "${LIMIT_S:-240}" "$python" -m outrider.cli "$@" 2>stderr.log || { echo "FAILED: outrider $*"; tail -3 stderr.log; }; }
heading() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

test -d pair || "$python" "$root/tools/make_synthetic_pair.py" 8B 1B --acceptance 0.75 --out pair --no-weights >/dev/null

heading "8B forward"
outrider bench engine pair/target "${gpu[@]}" "${made[@]}" --context 1024 --num-tokens 1 --num-tokens 5 --num-tokens 8 \
	--batch-size 1 --batch-size 8 --batch-size 32 --draft-length 1 --save engine-h200-8b
heading "1B draft loop"
outrider bench engine pair/draft "${gpu[@]}" "${made[@]}" --context 1024 --num-tokens 1 --num-tokens 5 \
	--batch-size 1 --batch-size 8 --batch-size 32 --draft-length 2 --draft-length 4 --draft-length 8 --save engine-h200-1b
if "$python" -m outrider.cli bench kernels --help >/dev/null 2>&1; then
	heading "kernels"
	outrider bench kernels "${gpu[@]}" --save kernels-h200
fi

heading "three processes"
"$python" -m outrider.cli serve pair/target --draft-model pair/draft "${gpu[@]}" "${made[@]}" --port "${address##*:}" \
	--max-model-len 12288 --set target.num_pages=12000 --set draft.num_pages=12000 --set coordinator.max_running_requests=64 \
	>serve.log 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null' EXIT
until grep -q "is ready at" serve.log || ! kill -0 "$server" 2>/dev/null; do sleep 0.5; done
grep "is ready at" serve.log || { echo "FAILED: outrider serve"; tail -20 serve.log; exit 1; }
for length in 2 3 4 5; do
	heading "one user, K = $length"
	outrider bench serve --address "$address" -k "$length" --baseline --runs 3 --num-prompts 4 --input-len 128 \
		--output-len 256 --max-concurrency 1 --device cuda --dtype bfloat16 --save "h200-8b-1b-k$length"
done
for users in 8 32 64; do
	heading "$users users, K = 4"
	outrider bench serve --address "$address" -k 4 --baseline --runs 1 --num-prompts "$users" --num-warmups "$users" --input-len 128 \
		--output-len 256 --max-concurrency "$users" --device cuda --dtype bfloat16 --save "h200-8b-1b-k4-users$users"
done
heading "long prompts beside running requests"
outrider bench interference --address "$address" -k 0 --device cuda --dtype bfloat16 --save interference-h200-k0
outrider bench interference --address "$address" -k 4 --device cuda --dtype bfloat16 --save interference-h200-k4
heading "the wire"
outrider bench rpc --samples 200 --save rpc-h200-host
heading "done"
