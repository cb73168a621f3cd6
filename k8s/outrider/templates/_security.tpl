{{/*
TLS on every hop: each service serves with a certificate of its own, the coordinator shows its own to target and draft,
and users show one where tls.users asks for it, the gateway among them. Inside one pod, links go over sockets of the pod
and need none.
*/}}

{{/* Whether links between services are TLS: dict "root". Empty is no. */}}
{{- define "outrider.linksSpeakTls" -}}
{{- if and .root.Values.tls.enabled (ne .root.Values.placement "samePod") }}yes{{ end }}
{{- end }}

{{/* Whether a service needs its certificate: dict "root" "name". Empty is no. */}}
{{- define "outrider.hasCertificate" -}}
{{- if and .root.Values.tls.enabled (not (include "outrider.onSocket" .)) }}yes{{ end }}
{{- end }}

{{/* The Secret with a service's tls.crt, tls.key and ca.crt: dict "root" "name". */}}
{{- define "outrider.tlsSecret" -}}
{{- index .root.Values.tls.secrets .name | default (printf "%s-%s-tls" (include "outrider.fullname" .root) .name) }}
{{- end }}

{{/* Flags for certificates and tokens, each on a line of its own: dict "root" "name". */}}
{{- define "outrider.securityFlags" -}}
{{- $tls := .root.Values.tls }}
{{- $tokens := .root.Values.tokens }}
{{- $public := eq .name "coordinator" }}
{{- if include "outrider.hasCertificate" . }}
- --tls-cert-file=/etc/outrider/tls/tls.crt
- --tls-key-file=/etc/outrider/tls/tls.key
{{- if eq .name "gateway" }}
- --coordinator-tls-ca-file=/etc/outrider/tls/ca.crt
{{- if $tls.users.required }}
- --coordinator-tls-cert-file=/etc/outrider/tls/tls.crt
- --coordinator-tls-key-file=/etc/outrider/tls/tls.key
{{- end }}
{{- else if not $public }}
- --tls-client-ca-file=/etc/outrider/tls/ca.crt
{{- else if $tls.users.required }}
- --tls-client-ca-file={{ ternary "/etc/outrider/users-ca/ca.crt" "/etc/outrider/tls/ca.crt" (not (empty $tls.users.caSecret.name)) }}
{{- end }}
{{- end }}
{{- if and (eq .name "draft") (include "outrider.linksSpeakTls" .) (include "outrider.hasChannels" .root) }}
- --link-tls-ca-file=/etc/outrider/tls/ca.crt
{{- end }}
{{- if and $public (include "outrider.linksSpeakTls" .) }}
- --link-tls-ca-file=/etc/outrider/tls/ca.crt
- --link-tls-cert-file=/etc/outrider/tls/tls.crt
- --link-tls-key-file=/etc/outrider/tls/tls.key
{{- end }}
{{- if and (has .name (list "coordinator" "gateway")) $tokens.api.name }}
- --api-token-file=/etc/outrider/api-token/token
{{- if and (eq .name "gateway") (not $tls.enabled) }}
- --allow-plaintext-token
{{- end }}
{{- end }}
{{- if and $tokens.links.name (ne .name "gateway") }}
- --link-token-file=/etc/outrider/link-token/token
{{- end }}
{{- end }}

{{/* Name -> Secret and items of what a service reads of secrets, as JSON: dict "root" "name". */}}
{{- define "outrider.secrets" -}}
{{- $tls := .root.Values.tls }}
{{- $tokens := .root.Values.tokens }}
{{- $public := eq .name "coordinator" }}
{{- $secrets := dict }}
{{- if include "outrider.hasCertificate" . }}
{{- $_ := set $secrets "tls" (dict "secretName" (include "outrider.tlsSecret" .)) }}
{{- if and $public $tls.users.required $tls.users.caSecret.name }}
{{- $_ := set $secrets "users-ca" (dict "secretName" $tls.users.caSecret.name "items" (list (dict "key" $tls.users.caSecret.key "path" "ca.crt"))) }}
{{- end }}
{{- end }}
{{- if and (has .name (list "coordinator" "gateway")) $tokens.api.name }}
{{- $_ := set $secrets "api-token" (dict "secretName" $tokens.api.name "items" (list (dict "key" $tokens.api.key "path" "token"))) }}
{{- end }}
{{- if and $tokens.links.name (ne .name "gateway") }}
{{- $_ := set $secrets "link-token" (dict "secretName" $tokens.links.name "items" (list (dict "key" $tokens.links.key "path" "token"))) }}
{{- end }}
{{- $secrets | toJson }}
{{- end }}

{{/* They as mounts and as volumes, YAML lists: dict "root" "name". Renewed ones appear in the running container. */}}
{{- define "outrider.secretMounts" -}}
{{- $name := .name }}
{{- range $secret, $source := include "outrider.secrets" . | fromJson }}
- name: {{ $secret }}-{{ $name }}
  mountPath: /etc/outrider/{{ $secret }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "outrider.secretVolumes" -}}
{{- $name := .name }}
{{- range $secret, $source := include "outrider.secrets" . | fromJson }}
- name: {{ $secret }}-{{ $name }}
  secret:
    defaultMode: 0440
    {{- toYaml $source | nindent 4 }}
{{- end }}
{{- end }}

{{/* What a caller needs to be let in: name -> volume source, as JSON. */}}
{{- define "outrider.testSecrets" -}}
{{- $secrets := dict }}
{{- $own := include "outrider.tlsSecret" (dict "root" . "name" "coordinator") }}
{{- if .Values.tls.enabled }}
{{- $_ := set $secrets "tls" (dict "secretName" $own "items" (list (dict "key" "ca.crt" "path" "ca.crt"))) }}
{{- if .Values.tls.users.required }}
{{- $_ := set $secrets "user" (dict "secretName" (.Values.test.tlsSecret | default $own) "defaultMode" 0440) }}
{{- end }}
{{- end }}
{{- if .Values.tokens.api.name }}
{{- $_ := set $secrets "token" (dict "secretName" .Values.tokens.api.name "items" (list (dict "key" .Values.tokens.api.key "path" "token"))) }}
{{- end }}
{{- $secrets | toJson }}
{{- end }}
