#!/usr/bin/env bash
# Chosen draft lengths beside plain decoding and fixed ones (FIXED_LENGTHS="3 5"), in one interleaved run: scripts/draft_lengths.sh [FOLDER]
# One target and one draft, and two coordinators on them: draft_length auto and fixed. The pair is synthetic, so nothing is
# downloaded; the table comes last. On one H200 with the defaults it takes some five minutes.
# DRAFT_WINDOW: tokens that the draft attends to. With a head of the target's shape: DRAFT=eagle3, dflash or mtp (embedded: the first two). METRICS_PORT and LOG_LEVEL are those of `outrider serve`.
# A run without a GPU, on the embedded pair:  DEVICE=cpu PAIR=embedded USERS="1 4" INPUT_LEN=64 OUTPUT_LEN=64 scripts/draft_lengths.sh
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-draft-lengths}
mkdir -p "$folder" && cd "$folder" || exit 1
export PYTHONPATH=$root:$root/coordinator:$root/draft_service:$root/target_service${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
acceptance=${ACCEPTANCE:-0.75} fixed=${FIXED_LENGTHS:-4} port=${PORT:-50970}
where=(--device "${DEVICE:-cuda}")
[[ -n ${DRAFT_DEVICE:-} ]] && where+=(--set draft.device="$DRAFT_DEVICE")
[[ -n ${DRAFT_WINDOW:-} ]] && where+=(--set draft.attention_window="$DRAFT_WINDOW")

if [[ ${PAIR:-} == embedded ]]; then
	models=("$root/outrider/demo/pair/target" --draft-model "$root/outrider/demo/pair/${DRAFT:-draft}")
else
	pair=pair-${TARGET:-8B}-${DRAFT:-1B}-$acceptance
	test -f "$pair/synthetic_pair.json" || "$python" "$root/tools/make_synthetic_pair.py" "${TARGET:-8B}" "${DRAFT:-1B}" \
		--acceptance "$acceptance" --out "$pair" --no-weights "${where[@]:0:2}" >pair.log 2>&1 || { tail -5 pair.log; exit 1; }
	models=("$pair/target")
	[[ ${DRAFT:-} == mtp ]] || models+=(--draft-model "$pair/draft") # which lies in the target's folder
	models+=(--load-format synthetic --dtype bfloat16
		--set target.num_pages="${PAGES:-12000}" --set draft.num_pages="${PAGES:-12000}" --max-model-len "${MAX_MODEL_LEN:-12288}")
fi
[[ ${DRAFT:-} == eagle3 || ${DRAFT:-} == dflash || ${DRAFT:-} == mtp ]] && models+=(--method "$DRAFT")
(umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >link-token)
token=$PWD/link-token target=127.0.0.1:$((port + 1)) draft=127.0.0.1:$((port + 2))
"$python" -m outrider.cli serve "${models[@]}" "${where[@]}" --port "$port" --set target.port="${target##*:}" \
	--set draft.port="${draft##*:}" --set target.link_token_file="$token" --set draft.link_token_file="$token" \
	--set coordinator.link_token_file="$token" --no-http ${METRICS_PORT:+--metrics-port "$METRICS_PORT"} \
	--log-level "${LOG_LEVEL:-info}" >serve.log 2>&1 &
processes=($!)
stop() {
	trap - EXIT
	kill "${processes[@]}" 2>/dev/null
	wait "${processes[@]}" 2>/dev/null
}
trap stop EXIT
ready() { # LOG WHAT
	local deadline=$((SECONDS + ${START_LIMIT_S:-600}))
	until grep -q "$2" "$1"; do
		if ((SECONDS > deadline)) || ! kill -0 "${processes[-1]}" 2>/dev/null; then
			echo "FAILED to start, see $folder/$1:"
			tail -5 "$1"
			exit 1
		fi
		sleep 0.5
	done
}
ready serve.log "is ready at"
"$python" -P -m outrider_coordinator --port $((port + 3)) --target-address "$target" --draft-address "$draft" \
	--link-token-file "$token" --draft-length fixed --num-speculative-tokens 16 >fixed.log 2>&1 &
processes+=($!)
ready fixed.log "the draft.* is attached"
arms=()
for users in ${USERS:-1 8 32 64 128}; do arms+=(--users "$users"); done
for length in $fixed; do arms+=(--fixed-length "$length"); done
"$python" "$root/tools/compare_draft_lengths.py" "127.0.0.1:$port" "127.0.0.1:$((port + 3))" "${arms[@]}" \
	--input-len "${INPUT_LEN:-128}" --output-len "${OUTPUT_LEN:-256}" --runs "${RUNS:-3}" \
	--rounds "${ROUNDS:-1}" --warmups "${WARMUPS:-1}" --temperature "${TEMPERATURE:-0}" --client-processes "${CLIENT_PROCESSES:-4}"
