{{/* The module a service is started as. */}}
{{- define "outrider.module" -}}
outrider_{{ . }}
{{- end }}

{{/* Whether a service listens on a socket file of the pod: dict "root" "name". Empty is no. */}}
{{- define "outrider.onSocket" -}}
{{- if and (eq .root.Values.placement "samePod") (has .name (list "target" "draft")) }}yes{{ end }}
{{- end }}

{{/* Whether drafts call targets of other pods. Empty is no. */}}
{{- define "outrider.hasChannels" -}}
{{- if and .Values.directChannels.enabled (ne .Values.placement "samePod") (or .Values.draft.enabled .Values.draft.address) }}yes{{ end }}
{{- end }}

{{/* What a service listens on: dict "root" "name" "block". */}}
{{- define "outrider.host" -}}
{{- if include "outrider.onSocket" . }}unix:/run/outrider/{{ .name }}.sock{{ else }}{{ .block.bindAddress }}{{ end }}
{{- end }}

{{/* Where the coordinator finds a service: dict "root" "name". */}}
{{- define "outrider.address" -}}
{{- $block := include "outrider.block" . | fromJson }}
{{- if include "outrider.onSocket" . -}}
unix:/run/outrider/{{ .name }}.sock
{{- else -}}
{{ include "outrider.fullname" .root }}-{{ .name }}:{{ $block.port }}
{{- end }}
{{- end }}

{{/* The folder of a block's model inside the container. */}}
{{- define "outrider.modelPath" -}}
{{- $source := ternary (.download.url | default .download.repository | trimSuffix "/") "" (eq .from "download") }}
{{- if eq .from "image" }}{{ .path }}{{ else }}{{ printf "/models/%s" (.path | default (ternary "" (base $source) (empty $source))) | trimSuffix "/" }}{{ end }}
{{- end }}

{{/* The flags of a service, a YAML list: dict "root" "name" "block". */}}
{{- define "outrider.flags" -}}
{{- if eq .name "gateway" }}
{{- include "outrider.gatewayFlags" . }}
{{- else }}
{{- include "outrider.serviceFlags" . }}
{{- end }}
{{- end }}

{{/* The flags of the gateway, a YAML list: dict "root" "name" "block". */}}
{{- define "outrider.gatewayFlags" -}}
- --host={{ .block.bindAddress }}
- --port={{ .block.port }}
- --coordinator-address={{ include "outrider.address" (dict "root" .root "name" "coordinator") }}
{{- if .root.Values.metrics.enabled }}
- --metrics-port={{ .block.metricsPort }}
{{- end }}
{{- include "outrider.securityFlags" . }}
- --drain-delay-s={{ .block.drain.delaySeconds }}
- --drain-grace-s={{ .block.drain.graceSeconds }}
{{- /* A path that users come by, unless it is one of the API's own. */}}
{{- $values := .root.Values }}
{{- $path := ternary $values.ingress.path (ternary $values.httpRoute.path "" $values.httpRoute.enabled) $values.ingress.enabled | trimSuffix "/" }}
{{- if and $path (not (hasPrefix "/v1" $path)) (not (hasKey .block.settings "root_path")) }}
- --root-path={{ $path }}
{{- end }}
{{- include "outrider.settingFlags" . }}
{{- end }}

{{/* The flags of a gRPC service, a YAML list: dict "root" "name" "block". */}}
{{- define "outrider.serviceFlags" -}}
- --host={{ include "outrider.host" . }}
{{- if not (include "outrider.onSocket" .) }}
- --port={{ .block.port }}
{{- end }}
{{- if eq .name "coordinator" }}
- --target-address={{ include "outrider.address" (dict "root" .root "name" "target") }}
{{- if .root.Values.draft.enabled }}
- --draft-address={{ include "outrider.address" (dict "root" .root "name" "draft") }}
{{- else if .root.Values.draft.address }}
- --draft-address={{ .root.Values.draft.address }}
{{- end }}
{{- if include "outrider.hasChannels" .root }}
- --channels-between-hosts
{{- end }}
{{- else }}
- --device={{ .block.device }}
{{- /* CUDA graphs are captured for what the coordinator will ask for. */}}
{{- $coordinator := include "outrider.block" (dict "root" .root "name" "coordinator") | fromJson }}
{{- $own := .block.settings }}
{{- range list "max_running_requests" "num_speculative_tokens" }}
{{- if and (hasKey $coordinator.settings .) (not (hasKey $own .)) }}
- {{ printf "--%s=%v" (replace "_" "-" .) (get $coordinator.settings . | toJson) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .name "target" }}
{{- include "outrider.headLayersFlag" . }}
{{- end }}
{{- if ne .block.model.from "none" }}
- --{{ ternary "tokenizer" "model" (eq .name "coordinator") }}={{ include "outrider.modelPath" .block.model }}
{{- end }}
{{- if gt (int .block.tensorParallelSize) 1 }}
- --tensor-parallel-size={{ .block.tensorParallelSize }}
{{- end }}
{{- if .root.Values.metrics.enabled }}
- --metrics-port={{ .block.metricsPort }}
{{- if include "outrider.onSocket" . }}
- --metrics-host={{ .block.bindAddress }}
{{- end }}
{{- end }}
{{- if and .root.Values.metrics.enabled .root.Values.metrics.vllmNames (has .name (list "coordinator" "target")) (not (hasKey .block.settings "vllm_metric_names")) }}
- --vllm-metric-names
{{- end }}
{{- if include "outrider.asksHttp" . }}
- --health-port={{ .block.healthPort }}
{{- end }}
{{- if include "outrider.onSocket" . }}
- --health-host={{ .block.bindAddress }}
{{- end }}
{{- include "outrider.securityFlags" . }}
{{- if and (eq .name "coordinator") .root.Values.service.maxConnectionAgeSeconds }}
- --max-connection-age-s={{ .root.Values.service.maxConnectionAgeSeconds }}
{{- end }}
- --drain-delay-s={{ .block.drain.delaySeconds }}
- --drain-grace-s={{ .block.drain.graceSeconds }}
{{- include "outrider.settingFlags" . }}
{{- end }}

{{/*
The layers that the release's draft head reads of the target: dict "root" "block" (the target's). The target reads the
head's config.json where both have the same volume, or image, as a head and its target mostly have.
*/}}
{{- define "outrider.headLayersFlag" -}}
{{- if and .root.Values.draft.enabled (not (hasKey .block.settings "hidden_state_layers")) }}
{{- $draft := include "outrider.block" (dict "root" .root "name" "draft") | fromJson }}
{{- $method := dig "method" "" $draft.settings }}
{{- $volume := include "outrider.modelVolume" $draft.model }}
{{- $hasFolder := and (eq $volume (include "outrider.modelVolume" .block.model)) (not (contains "emptyDir" $volume)) }}
{{- if eq $draft.model.from "image" }}
{{- $image := include "outrider.image" (dict "root" .root "name" "draft" "block" $draft) }}
{{- $hasFolder = and (eq .block.model.from "image") (eq $image (include "outrider.image" .)) }}
{{- end }}
{{- if has $method (list "eagle" "medusa" "mlp_speculator" "mtp") }}
- --hidden-state-layers=-1
{{- else if and (has $method (list "dflash" "eagle3")) $hasFolder }}
- {{ printf "--hidden-state-layers=%s:%s" $method (include "outrider.modelPath" $draft.model) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The flags of a block's settings, each on a line of its own: dict "block". */}}
{{- define "outrider.settingFlags" -}}
{{- range $key, $value := .block.settings }}
{{- $flag := $key | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $flag }}
{{- else }}
{{- /* As JSON, a large number keeps its digits. */}}
- {{ printf "--%s=%v" $flag (ternary $value (toJson $value) (kindIs "string" $value)) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The whole command of a service, a YAML list: dict "root" "name" "block". */}}
{{- define "outrider.command" -}}
{{- if gt (int .block.hosts) 1 -}}
- torchrun
- --nnodes=$(LWS_GROUP_SIZE)
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port=29500
- --nproc-per-node={{ div (int .block.tensorParallelSize) (int .block.hosts) }}
- -m
- {{ include "outrider.module" .name }}
{{- else if eq .name "gateway" -}}
- outrider
- gateway
{{- else -}}
- python
- -m
- {{ include "outrider.module" .name }}
{{- end }}
{{- end }}
