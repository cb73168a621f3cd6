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
    {{- toYaml (merge (include "outrider.selector" . | fromYaml) $lead.podLabels .root.Values.commonLabels) | nindent 4 }}
  {{- with $lead.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "outrider.serviceAccountName" (dict "root" .root "component" .component "block" $lead) }}
  automountServiceAccountToken: false
  # Without this, a Service called outrider-... sets variables that look like settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "outrider.graceSeconds" $blocks }}
  {{- with include "outrider.pullSecrets" .root }}
  imagePullSecrets:
    {{- . | nindent 4 }}
  {{- end }}
  {{- if $lead.hostNetwork }}
  hostNetwork: true
  # Names of the cluster, on the node's network.
  dnsPolicy: ClusterFirstWithHostNet
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
  {{- with (include "outrider.affinity" (dict "root" .root "component" .component "block" $lead) | fromJson) }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $lead.topologySpread.enabled (or (eq .component "gateway") (ne .root.Values.placement "sameNode")) (eq (int $lead.hosts) 1) }}
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
    {{- include "outrider.volumes" (dict "root" .root "component" .component "names" .names "blocks" $blocks) | trim | nindent 4 }}
  {{- if and .root.Values.sharedGpus.enabled (eq .component "all") }}
  resourceClaims:
    - name: gpus
      resourceClaimTemplateName: {{ include "outrider.fullname" .root }}-gpus
  {{- end }}
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
{{- /* Each block of a pod repeats what common says. */}}
{{- with uniq $extra }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Seconds from SIGTERM to the end of one program: its drain, and up to ten seconds for a trace collector that hangs. */}}
{{- define "outrider.drainSeconds" -}}
{{- ceil (addf .drain.delaySeconds .drain.graceSeconds 15) }}
{{- end }}

{{/* The pod's grace period: the longest of its programs', with the wait before SIGTERM: name -> block. */}}
{{- define "outrider.graceSeconds" -}}
{{- $longest := 0 }}
{{- range . }}
{{- $longest = max $longest (add (int (include "outrider.drainSeconds" .)) (int .drain.preStopSeconds)) }}
{{- end }}
{{- $longest }}
{{- end }}

{{/*
The block's own affinity: dict "root" "component" "block". As JSON. With placement=sameNode, all pods but the gateway's
must run where the pods with GPUs run, so that a coordinator that is placed first does not draw the others to a node
without GPUs. A pod that is made anew prefers the node of the rest of the release.
*/}}
{{- define "outrider.affinity" -}}
{{- $affinity := deepCopy .block.affinity }}
{{- if and (eq .root.Values.placement "sameNode") (ne .component "gateway") }}
{{- $all := without (include "outrider.services" .root | fromJson).names "gateway" }}
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

{{/* Services that ask for GPUs, or all but the gateway where none does: a JSON list in {"names": ...}. */}}
{{- define "outrider.withGpus" -}}
{{- $root := . }}
{{- $names := list }}
{{- range (include "outrider.services" . | fromJson).names }}
{{- if eq (include "outrider.block" (dict "root" $root "name" .) | fromJson).device "cuda" }}
{{- $names = append $names . }}
{{- end }}
{{- end }}
{{- dict "names" ($names | default (without (include "outrider.services" . | fromJson).names "gateway")) | toJson }}
{{- end }}

{{/* The node that has pods of these components, as an affinity term in JSON: dict "root" "components". */}}
{{- define "outrider.besideTerm" -}}
{{- $own := dict "app.kubernetes.io/name" (include "outrider.name" .root) "app.kubernetes.io/instance" .root.Release.Name }}
{{- $among := list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" .components) }}
{{- dict "labelSelector" (dict "matchLabels" $own "matchExpressions" $among) "topologyKey" "kubernetes.io/hostname" | toJson }}
{{- end }}

{{/* Volumes of a pod: dict "root" "component" "names" "blocks". */}}
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
{{- if eq .component "all" }}
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
{{- else if eq .from "oci" -}}
image:
  reference: {{ .oci.reference | quote }}
  pullPolicy: {{ .oci.pullPolicy }}
{{- else if .claim -}}
persistentVolumeClaim:
  claimName: {{ .claim }}
{{- else -}}
emptyDir:
  sizeLimit: {{ .download.size }}
{{- end }}
{{- end }}

{{/* Seconds that the programs of a pod may take to start, downloads of models included: name -> block. */}}
{{- define "outrider.startSeconds" -}}
{{- $downloads := 0 }}
{{- $longest := 0 }}
{{- range . }}
{{- $longest = max $longest (int .startupSeconds) }}
{{- if eq .model.from "download" }}
{{- $downloads = add $downloads (int .model.download.timeoutSeconds) }}
{{- end }}
{{- end }}
{{- add $longest $downloads }}
{{- end }}

{{/*
The progress deadline of a Deployment: dict "root" "component" "names". Ten minutes for a node and its images, and what
its programs may take to start. A coordinator is ready when a target is, and a gateway when a coordinator is: they
are given what the slowest pods of the release are.
*/}}
{{- define "outrider.deadlineSeconds" -}}
{{- $root := .root }}
{{- $longest := 0 }}
{{- range $component, $names := include "outrider.pods" .root | fromJson }}
{{- if or (eq $component $.component) (has $.component (list "coordinator" "gateway")) }}
{{- $blocks := dict }}
{{- range $names }}
{{- $_ := set $blocks . (include "outrider.block" (dict "root" $root "name" .) | fromJson) }}
{{- end }}
{{- $longest = max $longest (int (include "outrider.startSeconds" $blocks)) }}
{{- end }}
{{- end }}
{{- add $longest 600 }}
{{- end }}
