{{- define "outrider.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "outrider.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "outrider.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "outrider.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The services of this release, in the order in which they are of use: a JSON list in {"names": ...}. */}}
{{- define "outrider.services" -}}
{{- $names := list "target" "coordinator" }}
{{- if .Values.draft.enabled }}
{{- $names = list "target" "draft" "coordinator" }}
{{- end }}
{{- dict "names" $names | toJson }}
{{- end }}

{{/* Which pods there are: component -> the services in it, as JSON. */}}
{{- define "outrider.pods" -}}
{{- $names := (include "outrider.services" . | fromJson).names }}
{{- $pods := dict }}
{{- if eq .Values.placement "samePod" }}
{{- $_ := set $pods "all" $names }}
{{- else }}
{{- range $names }}
{{- $_ := set $pods . (list .) }}
{{- end }}
{{- end }}
{{- $pods | toJson }}
{{- end }}

{{/* The component whose pods run a service: dict "root" "name". */}}
{{- define "outrider.componentOf" -}}
{{- if eq .root.Values.placement "samePod" }}all{{ else }}{{ .name }}{{ end }}
{{- end }}

{{/* The service whose block speaks for a component's pods: dict "component". */}}
{{- define "outrider.leadOf" -}}
{{- if eq .component "all" }}target{{ else }}{{ .component }}{{ end }}
{{- end }}

{{/* One service's block laid over common, as JSON: dict "root" "name". */}}
{{- define "outrider.block" -}}
{{- mergeOverwrite (deepCopy .root.Values.common) (deepCopy (index .root.Values .name)) | toJson }}
{{- end }}

{{/* The name of a component's objects: dict "root" "component". */}}
{{- define "outrider.objectName" -}}
{{- if eq .component "all" }}{{ include "outrider.fullname" .root }}{{ else }}{{ include "outrider.fullname" .root }}-{{ .component }}{{ end }}
{{- end }}

{{/*
The name of what makes a component's pods: dict "root" "component" "block". A LeaderWorkerSet's controller makes a
headless Service of the set's name, in which pods of a group find each other before they are ready, and leaves one that
is there as it is: the set must not be called as the Service that users of its leaders ask for.
*/}}
{{- define "outrider.workloadName" -}}
{{- if gt (int .block.hosts) 1 }}{{ include "outrider.fullname" .root }}-group{{ else }}{{ include "outrider.objectName" . }}{{ end }}
{{- end }}

{{/* Labels that choose a component's pods: dict "root" "component". */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ include "outrider.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* All labels of an object: dict "root" "component". */}}
{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
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
