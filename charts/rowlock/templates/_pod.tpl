{{/* The one place that knows what a pod looks like. */}}

{{/* The values of a component: podDefaults under its own, as YAML. root, values. */}}
{{- define "rowlock.values" -}}
{{- mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy .values) | toYaml -}}
{{- end }}

{{/* The values of a pool: podDefaults, under workers, under its own. root, values. */}}
{{- define "rowlock.poolValues" -}}
{{- mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy (omit .root.Values.workers "pools")) (deepCopy (default dict .values)) | toYaml -}}
{{- end }}

{{/* Whether pods of this release migrate before they start. */}}
{{- define "rowlock.migratesInPods" -}}
{{- if and .Values.migrations.enabled (not .Values.demo.postgres.enabled) (eq .Values.migrations.mode "initContainer") }}true{{ end -}}
{{- end }}

{{/* A pod template's metadata and spec.
root        the root context
values      of the component, merged (rowlock.values, rowlock.poolValues)
component   its label, and pool for workers and masters
container   name of the main container
image       of it
pullPolicy  of it
args        of it
env         of it, a list; settings of the user's come after it
role        of the database; empty: it uses none
probes      whether it answers /livez and /readyz
port        whether it listens at metrics.port
migrate     whether it may migrate first
account     service account, empty for the namespace's default
token       whether it gets a token of it
volumes, volumeMounts   further ones, lists
command, ports, readinessProbe, restartPolicy: of those that differ
*/}}
{{- define "rowlock.podTemplate" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $file := not (has .component (list "master" "migrate")) -}}
{{- $database := dict "root" $root "role" (default "" .role) "file" $file -}}
metadata:
  labels:
    {{- $labels := include "rowlock.labels" (dict "root" $root "component" .component "pool" .pool) | fromYaml }}
    {{- if .pool }}
    {{- /* The operator gives a master's pod an instance of its own: this label survives. */}}
    {{- $_ := set $labels "batch.rowlock.dev/release" $root.Release.Name }}
    {{- end }}
    {{- /* Not what changes with each upgrade of the chart: pods start anew only if something of theirs changed. */}}
    {{- toYaml (mergeOverwrite (omit $labels "helm.sh/chart" "app.kubernetes.io/version") (deepCopy $values.podLabels)) | nindent 4 }}
  annotations:
    {{- $annotations := mergeOverwrite (dict "kubectl.kubernetes.io/default-container" .container) (deepCopy $root.Values.commonAnnotations) (deepCopy $values.podAnnotations) }}
    {{- toYaml $annotations | nindent 4 }}
spec:
  automountServiceAccountToken: {{ default false .token }}
  enableServiceLinks: false
  {{- with .account }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.terminationGracePeriodSeconds }}
  terminationGracePeriodSeconds: {{ int . }}
  {{- end }}
  {{- with $values.podSecurityContext }}
  securityContext: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "nodeSelector" "affinity" "tolerations" "priorityClassName" "runtimeClassName" "schedulerName" "hostAliases" "dnsPolicy" "dnsConfig" }}
  {{- with index $values $field }}
  {{ $field }}: {{ if kindIs "string" . }}{{ . | quote }}{{ else }}{{- toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  {{- if not (kindIs "invalid" $values.hostUsers) }}
  hostUsers: {{ $values.hostUsers }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "rowlock.selector" $ | fromYaml)) }}
    - {{ ternary . (merge $own .) (hasKey . "labelSelector") | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  {{- $migrates := and .migrate (include "rowlock.migratesInPods" $root) }}
  {{- if or $migrates $values.initContainers }}
  initContainers:
    {{- if $migrates }}
    - {{ include "rowlock.migrateContainer" (dict "root" $root "values" $values) | nindent 6 | trim }}
    {{- end }}
    {{- with $values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ .image | quote }}
      imagePullPolicy: {{ .pullPolicy }}
      {{- with .command }}
      command: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .args }}
      args: {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- if .role }}
        {{- include "rowlock.database.env" $database | trim | nindent 8 }}
        {{- end }}
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .port }}
      ports:
        {{- /* That of a master is given by the operator. */}}
        - {name: http, containerPort: {{ ternary 8080 (int $root.Values.metrics.port) (eq .component "master") }}}
      {{- end }}
      {{- with .ports }}
      ports: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .probes }}
      startupProbe:
        {{- $startup := dict "httpGet" (dict "path" "/livez" "port" "http") "periodSeconds" 2 "failureThreshold" 30 }}
        {{- toYaml (mergeOverwrite $startup (deepCopy $values.startupProbe)) | nindent 8 }}
      livenessProbe:
        {{- $liveness := dict "httpGet" (dict "path" "/livez" "port" "http") "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6 }}
        {{- toYaml (mergeOverwrite $liveness (deepCopy $values.livenessProbe)) | nindent 8 }}
      readinessProbe:
        {{- $readiness := dict "httpGet" (dict "path" "/readyz" "port" "http") "periodSeconds" 5 "timeoutSeconds" 5 }}
        {{- toYaml (mergeOverwrite $readiness (deepCopy $values.readinessProbe)) | nindent 8 }}
      {{- end }}
      {{- with .readinessProbe }}
      readinessProbe: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.lifecycle }}
      lifecycle: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.securityContext }}
      securityContext: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- if .role }}
        {{- with include "rowlock.database.volumeMounts" $database | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- with .volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
        {{- with $values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- if .role }}
    {{- with include "rowlock.database.volumes" $database | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    - name: tmp
      emptyDir: {{ toJson $values.tmp }}
    {{- with $values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The init container that migrates: root, values (for its security context). */}}
{{- define "rowlock.migrateContainer" -}}
{{- $database := dict "root" .root "role" "owner" "file" false -}}
name: migrate
image: {{ include "rowlock.image" (dict "root" .root "image" .root.Values.image) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [migrate]
env:
  {{- include "rowlock.database.env" $database | trim | nindent 2 }}
resources: {{- toYaml .root.Values.migrations.resources | nindent 2 }}
{{- with .values.securityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- with include "rowlock.database.volumeMounts" $database | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* The pod of a worker, or of a master of the pool: root, pool (its name), values (merged), component. */}}
{{- define "rowlock.workerPod" -}}
{{- $values := .values -}}
{{- $worker := eq .component "worker" -}}
{{- if lt (int $values.terminationGracePeriodSeconds) (add 10 (int $values.drainSeconds)) -}}
{{- fail (printf "pool %s: terminationGracePeriodSeconds=%v must be at least 10 more than drainSeconds=%v" .pool $values.terminationGracePeriodSeconds $values.drainSeconds) -}}
{{- end -}}
{{- $env := list (dict "name" "ROWLOCK_DRAIN_SECONDS" "value" (include "rowlock.number" $values.drainSeconds)) (dict "name" "ROWLOCK_LOG_FORMAT" "value" $values.logFormat) -}}
{{- range $name, $value := $values.settings -}}
{{- $env = append $env (dict "name" $name "value" (include "rowlock.number" $value)) -}}
{{- end -}}
{{- $args := list -}}
{{- if $worker -}}
{{- $args = list "node" "--pool" .pool "--slots" (toString $values.slots) "--http" (toString .root.Values.metrics.port) -}}
{{- range $values.imports -}}
{{- $args = concat $args (list "--import" .) -}}
{{- end -}}
{{- $args = concat $args $values.extraArgs -}}
{{- else if $values.master.resources -}}
{{- $_ := set $values "resources" $values.master.resources -}}
{{- end -}}
{{- include "rowlock.podTemplate" (dict "root" .root "values" $values "component" .component "pool" .pool
      "container" "rowlock" "image" (include "rowlock.workerImage" (dict "root" .root "image" $values.image))
      "pullPolicy" (default .root.Values.image.pullPolicy $values.image.pullPolicy)
      "args" $args "env" $env "role" "node" "port" true "probes" $worker "migrate" $worker
      "account" $values.serviceAccountName) -}}
{{- end }}
