{{/* The name of all objects: the release's, with "reducer" in it. A revision's label, which
     Kubernetes makes of it, needs 11 of 63 characters. */}}
{{- define "reducer.name" -}}
{{- $name := ternary .Release.Name (printf "%s-reducer" .Release.Name) (contains "reducer" .Release.Name) -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "reducer.selector" -}}
app.kubernetes.io/name: reducer
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "reducer.labels" -}}
{{ include "reducer.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "reducer.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else if eq $image.tag "latest" -}}
{{ fail "image.tag: name a version; with `latest`, reducers that start again may have another one than the others" }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* What workers take as REDUCTION_SERVERS. */}}
{{- define "reducer.servers" -}}
{{- $name := include "reducer.name" . -}}
{{- range $index := until (int .Values.replicas) -}}
{{- if $index }},{{ end }}{{ $name }}-{{ $index }}.{{ $name }}.{{ $.Release.Namespace }}:5555
{{- end -}}
{{- end -}}
