{{- define "outrider.name" -}}
{{- include "outrider.shortened" (.Values.nameOverride | default .Chart.Name) }}
{{- end }}

{{- define "outrider.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- include "outrider.shortened" .Values.fullnameOverride }}
{{- else if contains (include "outrider.name" .) .Release.Name }}
{{- include "outrider.shortened" .Release.Name }}
{{- else }}
{{- include "outrider.shortened" (printf "%s-%s" .Release.Name (include "outrider.name" .)) }}
{{- end }}
{{- end }}

{{/* A name of at most 40 characters. A longer one keeps its beginning and ends with a hash of the whole, so that names
that differ only at the end stay distinct. */}}
{{- define "outrider.shortened" -}}
{{- if gt (len .) 40 -}}
{{ . | trunc 31 | trimSuffix "-" }}-{{ . | sha256sum | trunc 8 }}
{{- else -}}
{{ . | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The services of this release, those that the others call first: a JSON list in {"names": ...}. */}}
{{- define "outrider.services" -}}
{{- $names := list "target" }}
{{- if .Values.draft.enabled }}
{{- $names = append $names "draft" }}
{{- end }}
{{- $names = append $names "coordinator" }}
{{- if .Values.gateway.enabled }}
{{- $names = append $names "gateway" }}
{{- end }}
{{- dict "names" $names | toJson }}
{{- end }}

{{/* The pods of this release: component -> the services in it, as JSON. The gateway always has pods of its own. */}}
{{- define "outrider.pods" -}}
{{- $pods := dict }}
{{- $together := list }}
{{- range (include "outrider.services" . | fromJson).names }}
{{- if and (eq $.Values.placement "samePod") (ne . "gateway") }}
{{- $together = append $together . }}
{{- else }}
{{- $_ := set $pods . (list .) }}
{{- end }}
{{- end }}
{{- with $together }}
{{- $_ := set $pods "all" . }}
{{- end }}
{{- $pods | toJson }}
{{- end }}

{{/* The component whose pods run a service: dict "root" "name". */}}
{{- define "outrider.componentOf" -}}
{{- if and (eq .root.Values.placement "samePod") (ne .name "gateway") }}all{{ else }}{{ .name }}{{ end }}
{{- end }}

{{/* The service whose block describes a component's pods: dict "component". */}}
{{- define "outrider.leadOf" -}}
{{- if eq .component "all" }}target{{ else }}{{ .component }}{{ end }}
{{- end }}

{{/* One service's block laid over common, as JSON: dict "root" "name". The gateway has no model, whatever common says. */}}
{{- define "outrider.block" -}}
{{- $block := mergeOverwrite (deepCopy .root.Values.common) (deepCopy (index .root.Values .name)) }}
{{- if eq .name "gateway" }}
{{- $_ := set $block "model" (dict "from" "none" "createClaim" (dict "enabled" false)) }}
{{- $block = mergeOverwrite $block (dict "device" "none" "tensorParallelSize" 1 "hosts" 1) }}
{{- end }}
{{- $block | toJson }}
{{- end }}

{{/* The name of a component's objects: dict "root" "component". */}}
{{- define "outrider.objectName" -}}
{{- if eq .component "all" }}{{ include "outrider.fullname" .root }}{{ else }}{{ include "outrider.fullname" .root }}-{{ .component }}{{ end }}
{{- end }}

{{/*
The name of the Deployment or LeaderWorkerSet of a component: dict "root" "component" "block". The controller of
LeaderWorkerSets makes a headless Service of the set's name, through which pods of a group find each other before they
are ready, and does not change a Service that exists. The set's name therefore differs from that of the chart's Service.
*/}}
{{- define "outrider.workloadName" -}}
{{- if gt (int .block.hosts) 1 }}{{ include "outrider.fullname" .root }}-group{{ else }}{{ include "outrider.objectName" . }}{{ end }}
{{- end }}

{{/* Labels that select a component's pods: dict "root" "component". */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ include "outrider.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* All labels of an object: dict "root" "component", optionally "more": labels of this object alone. */}}
{{- define "outrider.labels" -}}
{{- $labels := include "outrider.selector" . | fromYaml }}
{{- $_ := set $labels "app.kubernetes.io/part-of" "outrider" }}
{{- $_ := set $labels "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $labels "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- toYaml (merge $labels (.more | default dict) .root.Values.commonLabels) }}
{{- end }}

{{/* Names of Secrets for pulling images, a YAML list of {name: ...}; empty without any. */}}
{{- define "outrider.pullSecrets" -}}
{{- $secrets := list }}
{{- range concat .Values.imagePullSecrets .Values.image.pullSecrets }}
{{- $secrets = append $secrets (ternary (dict "name" .) . (kindIs "string" .)) }}
{{- end }}
{{- with uniq $secrets }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* The image of a block: dict "root" "block". */}}
{{- define "outrider.image" -}}
{{- $variant := .block.image.variant | default (ternary "coordinator" .block.device (eq .block.device "none")) }}
{{- if .block.image.digest -}}
{{ .root.Values.image.repository }}@{{ .block.image.digest }}
{{- else -}}
{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}-{{ $variant }}
{{- end }}
{{- end }}

{{- define "outrider.serviceAccountName" -}}
{{- if .block.serviceAccount.name }}
{{- .block.serviceAccount.name }}
{{- else if .block.serviceAccount.create }}
{{- include "outrider.objectName" . }}
{{- else -}}
default
{{- end }}
{{- end }}
