{{/*
Probes ask the gRPC health service. kubelet speaks gRPC neither over TLS nor to a socket file: there the same answers
come from the health port. The gateway answers over its own HTTP. Liveness says that the process is there: it follows
neither the target nor a drain. A coordinator is ready with a target alone, whatever the draft does, and a gateway
with a coordinator that is.
*/}}

{{/* Whether probes go to the health port: dict "root" "name". Empty is no. */}}
{{- define "outrider.asksHttp" -}}
{{- if and (ne .name "gateway") (or .root.Values.tls.enabled (include "outrider.onSocket" .)) }}yes{{ end }}
{{- end }}

{{/* The name of a container's port, once in a pod: dict "root" "name" "port". */}}
{{- define "outrider.portName" -}}
{{- if include "outrider.onSocket" . }}{{ .port }}-{{ .name }}{{ else }}{{ .port }}{{ end }}
{{- end }}

{{/* One question to a service: dict "root" "name" "block" "path" "service". */}}
{{- define "outrider.question" -}}
{{- if eq .name "gateway" -}}
httpGet:
  path: {{ ternary "/version" "/health" (eq .path "/livez") }}
  port: http
  {{- if include "outrider.hasCertificate" . }}
  scheme: HTTPS
  {{- end }}
{{- else if include "outrider.asksHttp" . -}}
httpGet:
  path: {{ .path }}
  port: {{ include "outrider.portName" (merge (dict "port" "health") .) }}
{{- else -}}
grpc:
  port: {{ .block.port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The probes of a service's container: dict "root" "name" "block". */}}
{{- define "outrider.probes" -}}
{{- $live := merge (dict "path" "/livez" "service" "liveness") . }}
{{- $ready := merge (dict "path" "/readyz" "service" "") . }}
{{- /* In one pod, a draft that is not ready must not keep users from the coordinator beside it. */}}
{{- $matters := not (and (eq .root.Values.placement "samePod") (eq .name "draft")) }}
{{- if $matters }}
startupProbe:
  {{- include "outrider.question" (ternary $live $ready (has .name (list "coordinator" "gateway"))) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int .block.startupSeconds) 5) }}
readinessProbe:
  {{- include "outrider.question" $ready | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}
livenessProbe:
  {{- include "outrider.question" $live | nindent 2 }}
  {{- if not $matters }}
  initialDelaySeconds: 30
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
