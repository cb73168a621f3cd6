{{/*
The one pod template: dict "root", "component", "names" (the services in the pod), "serves" (false: the followers of a
group). Called once for each of the three services; once for all of them when they share a pod.
*/}}
{{- define "outrider.podTemplate" -}}
{{- $root := .root }}
{{- $serves := .serves }}
{{- $lead := include "outrider.block" (dict "root" .root "name" (include "outrider.leadOf" .)) | fromJson }}
{{- $blocks := dict }}
{{- $beside := list }}
{{- range .names }}
{{- $_ := set $blocks . (include "outrider.block" (dict "root" $root "name" .) | fromJson) }}
{{- end }}
metadata:
  # No versions among these: a newer chart alone does not make pods load their models again.
  labels:
    {{- include "outrider.selector" . | nindent 4 }}
    {{- with $lead.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $lead.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "outrider.serviceAccountName" (dict "root" .root "component" .component "block" $lead) }}
  automountServiceAccountToken: false
  # A Service called outrider-... would otherwise make variables that look like settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "outrider.graceSeconds" $blocks }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $lead.podSecurityContext | nindent 4 }}
  {{- with $lead.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $lead.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $lead.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $lead.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $lead.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with (include "outrider.affinity" (dict "root" .root "block" $lead) | fromJson) }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $lead.topologySpread.enabled (ne .root.Values.placement "sameNode") (eq (int $lead.hosts) 1) }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: {{ $lead.topologySpread.topologyKey }}
      whenUnsatisfiable: {{ $lead.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "outrider.selector" . | nindent 10 }}
  {{- end }}
  {{- with (include "outrider.initContainers" (dict "root" .root "names" .names "blocks" $blocks) | trim) }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    {{- range .names }}
    {{- include "outrider.container" (dict "root" $root "name" . "block" (index $blocks .) "serves" $serves) | nindent 4 }}
    {{- $beside = concat $beside (index $blocks .).extraContainers }}
    {{- end }}
    {{- with uniq $beside }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "outrider.volumes" (dict "root" .root "names" .names "blocks" $blocks) | trim | nindent 4 }}
{{- end }}

{{/* What runs before a pod's programs, a YAML list: dict "root" "names" "blocks". */}}
{{- define "outrider.initContainers" -}}
{{- $extra := list }}
{{- range .names }}
{{- $block := index $.blocks . }}
{{- if eq $block.model.from "download" }}
{{ include "outrider.download" (dict "root" $.root "name" . "block" $block) | trim }}
{{- end }}
{{- $extra = concat $extra $block.extraInitContainers }}
{{- end }}
{{- /* What common says is said by each block of a pod. */}}
{{- with uniq $extra }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* From SIGTERM to the end, as one program counts it: the drain, and up to ten seconds for a collector that hangs. */}}
{{- define "outrider.drainSeconds" -}}
{{- ceil (addf .drain.delaySeconds .drain.graceSeconds 15) }}
{{- end }}

{{/* The pod's grace: the longest of its programs', the wait before SIGTERM included: name -> block. */}}
{{- define "outrider.graceSeconds" -}}
{{- $longest := 0 }}
{{- range . }}
{{- $longest = max $longest (add (int (include "outrider.drainSeconds" .)) (int .drain.preStopSeconds)) }}
{{- end }}
{{- $longest }}
{{- end }}

{{/*
The block's own affinity: dict "root" "block". As JSON. On one node, all pods follow those that ask for GPUs, so that a
coordinator that is placed first does not draw the others to a node without any; a pod that is made anew would rather
be where the rest of the release still is.
*/}}
{{- define "outrider.affinity" -}}
{{- $affinity := deepCopy .block.affinity }}
{{- if eq .root.Values.placement "sameNode" }}
{{- $all := (include "outrider.services" .root | fromJson).names }}
{{- $pods := get $affinity "podAffinity" | default dict }}
{{- $required := get $pods "requiredDuringSchedulingIgnoredDuringExecution" | default list }}
{{- $preferred := get $pods "preferredDuringSchedulingIgnoredDuringExecution" | default list }}
{{- $term := include "outrider.besideTerm" (dict "root" .root "components" (include "outrider.withGpus" .root | fromJson).names) | fromJson }}
{{- $_ := set $pods "requiredDuringSchedulingIgnoredDuringExecution" (append $required $term) }}
{{- $rest := include "outrider.besideTerm" (dict "root" .root "components" $all) | fromJson }}
{{- $_ := set $pods "preferredDuringSchedulingIgnoredDuringExecution" (append $preferred (dict "weight" 100 "podAffinityTerm" $rest)) }}
{{- $_ := set $affinity "podAffinity" $pods }}
{{- end }}
{{- $affinity | toJson }}
{{- end }}

{{/* Services that ask for GPUs, or all where none does: a JSON list in {"names": ...}. */}}
{{- define "outrider.withGpus" -}}
{{- $root := . }}
{{- $names := list }}
{{- range (include "outrider.services" . | fromJson).names }}
{{- if eq (include "outrider.block" (dict "root" $root "name" .) | fromJson).device "cuda" }}
{{- $names = append $names . }}
{{- end }}
{{- end }}
{{- dict "names" ($names | default (include "outrider.services" . | fromJson).names) | toJson }}
{{- end }}

{{/* The node that has pods of these components, as an affinity term in JSON: dict "root" "components". */}}
{{- define "outrider.besideTerm" -}}
{{- $own := dict "app.kubernetes.io/name" (include "outrider.name" .root) "app.kubernetes.io/instance" .root.Release.Name }}
{{- $among := list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" .components) }}
{{- dict "labelSelector" (dict "matchLabels" $own "matchExpressions" $among) "topologyKey" "kubernetes.io/hostname" | toJson }}
{{- end }}

{{/* Volumes of a pod: dict "root" "names" "blocks". */}}
{{- define "outrider.volumes" -}}
{{- $root := .root }}
{{- $shm := (index .blocks (first .names)).shmSize }}
{{- $extra := list }}
{{- range .names }}
{{- $block := index $.blocks . }}
- name: cache-{{ . }}
  emptyDir:
    sizeLimit: {{ $block.cacheSize }}
{{- if not (has $block.model.from (list "none" "image")) }}
- name: model-{{ . }}
  {{- include "outrider.modelVolume" $block.model | nindent 2 }}
{{- end }}
{{- include "outrider.secretVolumes" (dict "root" $root "name" .) }}
{{- $extra = concat $extra $block.extraVolumes }}
{{- end }}
{{- with uniq $extra }}
{{ toYaml . }}
{{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $shm }}
{{- if eq .root.Values.placement "samePod" }}
- name: sockets
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
{{- end }}
{{- end }}

{{- define "outrider.modelVolume" -}}
{{- if eq .from "hostPath" -}}
hostPath:
  path: {{ .hostPath }}
  type: Directory
{{- else if .claim -}}
persistentVolumeClaim:
  claimName: {{ .claim }}
{{- else -}}
emptyDir:
  sizeLimit: {{ .download.size }}
{{- end }}
{{- end }}
