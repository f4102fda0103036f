{{/* Names, labels and images. Every template here takes the root context, or a dict with it as `root`. */}}

{{- define "rowlock.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 48 | trimSuffix "-" -}}
{{- end }}

{{/* At most 48 characters, so that the names of Services still fit. */}}
{{- define "rowlock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else if contains (include "rowlock.name" .) .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "rowlock.name" .) | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "rowlock.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end }}

{{/* Name of a pool's objects. */}}
{{- define "rowlock.workerName" -}}
{{- printf "%s-worker-%s" (include "rowlock.fullname" .root) .pool -}}
{{- end }}

{{- define "rowlock.operatorAccount" -}}
{{- if .Values.operator.serviceAccount.create -}}
{{- default (printf "%s-operator" (include "rowlock.fullname" .)) .Values.operator.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.operator.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* What tells the pods of a component from all others: root, component, and pool for workers and masters. */}}
{{- define "rowlock.selector" -}}
{{- /* The operator gives a master its own name and instance. */ -}}
{{- if eq .component "master" -}}
batch.rowlock.dev/release: {{ .root.Release.Name }}
{{- else -}}
app.kubernetes.io/name: {{ include "rowlock.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
batch.rowlock.dev/pool: {{ . }}
{{- end }}
{{- end }}

{{/* A number as text: Helm's numbers are floats, which would print a million as 1e+06. */}}
{{- define "rowlock.number" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Labels of an object: root, component, and pool for workers. */}}
{{- define "rowlock.labels" -}}
{{ include "rowlock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rowlock
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Metadata of an object: root, component, name; perhaps pool, namespace (empty for none), labels, annotations. */}}
{{- define "rowlock.metadata" -}}
metadata:
  name: {{ .name }}
  {{- if not .clusterWide }}
  namespace: {{ default (include "rowlock.namespace" .root) .namespace }}
  {{- end }}
  labels:
    {{- $own := include "rowlock.labels" . | fromYaml }}
    {{- toYaml (mergeOverwrite $own (deepCopy (default dict .labels))) | nindent 4 }}
  {{- $annotations := mergeOverwrite (deepCopy .root.Values.commonAnnotations) (deepCopy (default dict .annotations)) }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* An image: root, image. */}}
{{- define "rowlock.image" -}}
{{- $registry := default .root.Values.image.registry .image.registry -}}
{{- /* As Docker tells a registry from a folder. */ -}}
{{- $whole := or (not $registry) (regexMatch "^([^/]*[.:][^/]*|localhost)/" .image.repository) -}}
{{- $name := ternary .image.repository (printf "%s/%s" $registry .image.repository) $whole -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end }}

{{/* The image of the workers, which is the demonstration's if there is no other. */}}
{{- define "rowlock.workerImage" -}}
{{- if .image.repository -}}
{{- /* Its versions are none of rowlock's. */ -}}
{{- include "rowlock.image" (dict "root" .root "image" (merge (dict "tag" (default .root.Chart.AppVersion .image.tag)) .image)) -}}
{{- else if .root.Values.demo.postgres.enabled -}}
{{- include "rowlock.image" (dict "root" .root "image" .root.Values.demo.postgres.image) -}}
{{- else -}}
{{- fail "workers.image.repository is empty: name the image with your jobs (or try demo.postgres.enabled=true)" -}}
{{- end -}}
{{- end }}
