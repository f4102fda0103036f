{{/* The BatchJob of NOTES.txt and `helm test`. */}}

{{- define "rowlock.sampleJob" -}}
{{- if .Values.tests.batchJob.job -}}
{{- .Values.tests.batchJob.job -}}
{{- else if and .Values.demo.postgres.enabled (not .Values.workers.image.repository) -}}
flights.settle
{{- else -}}
rowlock.helm-test
{{- end -}}
{{- end }}

{{- define "rowlock.sampleParameters" -}}
{{- if and (not .Values.tests.batchJob.parameters) (eq (include "rowlock.sampleJob" .) "flights.settle") -}}
month: 1
{{- /* So that a person can watch. */}}
pace_ms: 1000
{{- else -}}
{{- toYaml .Values.tests.batchJob.parameters -}}
{{- end -}}
{{- end }}

{{/* The Secrets of a master's pod, for people. */}}
{{- define "rowlock.notes.secrets" -}}
{{- $names := list -}}
{{- $secret := include "rowlock.database.secret" (dict "root" . "role" "node") | fromYaml -}}
{{- $names = append $names (default .Values.database.users.node.passwordSecret.name $secret.name) -}}
{{- if not .Values.demo.postgres.enabled -}}
{{- $names = concat $names (list .Values.database.tls.caSecret.name .Values.database.tls.certSecret.name) -}}
{{- end -}}
{{- $names = append $names .Values.database.work.existingSecret -}}
{{- range .Values.imagePullSecrets }}{{ $names = append $names .name }}{{ end -}}
{{- compact $names | uniq | join ", " -}}
{{- end }}

{{/* The most sessions that the pods of the release open at a time: a node has two of its own and one for each
     executor whose author code is in a transaction, of which there is one more than slots. */}}
{{- define "rowlock.notes.connections" -}}
{{- $total := 0 -}}
{{- range $pool, $given := .Values.workers.pools -}}
{{- $values := include "rowlock.poolValues" (dict "root" $ "values" $given) | fromYaml -}}
{{- $nodes := int (ternary $values.replicas $values.autoscaling.maxReplicas (eq $values.autoscaling.type "none")) -}}
{{- $total = add $total (mul $nodes (add 3 (int $values.slots))) -}}
{{- end -}}
{{- if .Values.operator.enabled }}{{ $total = add $total (mul 2 (int .Values.operator.replicas)) }}{{ end -}}
{{- if .Values.exporter.enabled }}{{ $total = add $total (int .Values.exporter.replicas) }}{{ end -}}
{{- $total -}}
{{- end }}
