{{/* One service's container: dict "root" "name" "block" "serves" (false: a follower of a group, which takes no calls). */}}
{{- define "outrider.container" -}}
- name: {{ .name }}
  image: {{ include "outrider.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command:
    {{- include "outrider.command" . | nindent 4 }}
  args:
    {{- include "outrider.flags" . | nindent 4 }}
  env:
    {{- include "outrider.environment" . | trim | nindent 4 }}
  {{- with .block.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .serves }}
  ports:
    {{- include "outrider.ports" . | trim | nindent 4 }}
  {{- include "outrider.probes" . | trim | nindent 2 }}
  {{- end }}
  lifecycle:
    preStop:
      sleep:
        seconds: {{ .block.drain.preStopSeconds }}
  resources:
    {{- include "outrider.resources" . | trim | nindent 4 }}
  securityContext:
    {{- toYaml .block.securityContext | nindent 4 }}
  # A program that cannot go on says why in one line.
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    {{- include "outrider.mounts" . | nindent 4 }}
{{- end }}

{{- define "outrider.ports" -}}
{{- $ports := list }}
{{- if not (include "outrider.onSocket" .) }}
{{- $ports = append $ports (dict "name" (ternary "http" "grpc" (eq .name "gateway")) "containerPort" .block.port) }}
{{- end }}
{{- if .root.Values.metrics.enabled }}
{{- $ports = append $ports (dict "name" (include "outrider.portName" (merge (dict "port" "metrics") .)) "containerPort" .block.metricsPort) }}
{{- end }}
{{- if include "outrider.asksHttp" . }}
{{- $ports = append $ports (dict "name" (include "outrider.portName" (merge (dict "port" "health") .)) "containerPort" .block.healthPort) }}
{{- end }}
{{- toYaml $ports }}
{{- end }}

{{- define "outrider.environment" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: HOME
  value: /var/cache/outrider
- name: HF_HOME
  value: /var/cache/outrider/huggingface
- name: TRITON_CACHE_DIR
  value: /var/cache/outrider/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /var/cache/outrider/inductor
{{- if gt (int .block.hosts) 1 }}
# torchrun kills what has not ended after this; its own default is shorter than a drain.
- name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT
  value: {{ include "outrider.drainSeconds" .block | quote }}
{{- end }}
{{- with .root.Values.tracing }}
{{- if .endpoint }}
- name: OTEL_SERVICE_NAME
  value: outrider-{{ $.name }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $.root.Release.Namespace }},k8s.pod.name=$(POD_NAME),service.instance.id=$(POD_NAME)
- name: OTEL_TRACES_EXPORTER
  value: otlp
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ .protocol }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .samplingRatio | quote }}
{{- if .headersSecret.name }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      {{- toYaml .headersSecret | nindent 6 }}
{{- end }}
{{- end }}
{{- end }}
{{- with .block.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* CPU and memory as given, and the GPUs of one pod, or the claim of those that it shares: dict "root" "block". */}}
{{- define "outrider.resources" -}}
{{- $resources := deepCopy .block.resources }}
{{- if and (eq .block.device "cuda") .root.Values.sharedGpus.enabled }}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) }}
{{- else if eq .block.device "cuda" }}
{{- $gpus := dict .block.gpuResource (div (int .block.tensorParallelSize) (int .block.hosts)) }}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpus "limits" $gpus) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "outrider.mounts" -}}
- name: cache-{{ .name }}
  mountPath: /var/cache/outrider
  subPath: cache
- name: cache-{{ .name }}
  mountPath: /tmp
  subPath: tmp
- name: shm
  mountPath: /dev/shm
{{- if eq (include "outrider.componentOf" .) "all" }}
- name: sockets
  mountPath: /run/outrider
{{- end }}
{{- if not (has .block.model.from (list "none" "image")) }}
- name: model-{{ .name }}
  mountPath: /models
  readOnly: true
{{- end }}
{{- include "outrider.secretMounts" . }}
{{- with .block.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/*
The init container that fetches a model from the Hub, S3 or Cloud Storage: dict "root" "name" "block". A model that is
there already is checked against its source, where the source can be reached.
*/}}
{{- define "outrider.download" -}}
{{- $download := .block.model.download }}
- name: download-{{ .name }}
  image: {{ include "outrider.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command:
    - python
    - /opt/outrider/download_model.py
    - {{ $download.url | default $download.repository | quote }}
    - {{ include "outrider.modelPath" .block.model }}
    {{- if not $download.url }}
    - --revision={{ $download.revision }}
    {{- end }}
    {{- if eq .name "coordinator" }}
    - --no-weights
    {{- end }}
  env:
    - name: HOME
      value: /var/cache/outrider
    - name: HF_HOME
      value: /var/cache/outrider/huggingface
    # Off: the cache of chunks would be a second copy of the model.
    - name: HF_XET_CHUNK_CACHE_SIZE_BYTES
      value: "0"
    {{- if $download.tokenSecret.name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          {{- toYaml $download.tokenSecret | nindent 10 }}
    {{- end }}
    {{- with .block.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $variables := .block.envFrom }}
  {{- if $download.credentialsSecret }}
  {{- $variables = append $variables (dict "secretRef" (dict "name" $download.credentialsSecret)) }}
  {{- end }}
  {{- with $variables }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError
  resources:
    {{- toYaml $download.resources | nindent 4 }}
  securityContext:
    {{- toYaml .block.securityContext | nindent 4 }}
  volumeMounts:
    - name: cache-{{ .name }}
      mountPath: /var/cache/outrider
      subPath: cache
    - name: cache-{{ .name }}
      mountPath: /tmp
      subPath: tmp
    - name: model-{{ .name }}
      mountPath: /models
{{- end }}
