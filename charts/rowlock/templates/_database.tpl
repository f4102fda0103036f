{{/* How a pod finds the database as one of the roles owner, node, operator, reader. Passwords stay in
     Secrets: connection strings come from there as a whole, or libpq puts one together from PG… variables. */}}

{{/* The Secret with the connection string of a role, as YAML: name, key. Empty if there is a host instead. */}}
{{- define "rowlock.database.secret" -}}
{{- $database := .root.Values.database -}}
{{- $own := index $database.secrets .role -}}
{{- if and (eq .role "reader") (not $own.name) (not $own.key) -}}
{{- $own = $database.secrets.operator -}}
{{- end -}}
{{- if .root.Values.demo.postgres.enabled -}}
name: {{ include "rowlock.fullname" .root }}-demo-database
key: {{ .role }}
{{- else if or $own.name $database.existingSecret -}}
name: {{ default $database.existingSecret $own.name }}
key: {{ default $database.existingSecretKey $own.key }}
{{- else if not $database.host -}}
{{- fail (printf "database: name the Secret with a connection string (database.existingSecret, or database.secrets.%s), or a database.host with users; or try demo.postgres.enabled=true" .role) -}}
{{- end -}}
{{- end }}

{{/* The login of a role at database.host, as in database.users. */}}
{{- define "rowlock.database.user" -}}
{{- $users := .root.Values.database.users -}}
{{- $user := index $users .role -}}
{{- if and (eq .role "reader") (not $user.name) -}}
{{- $user = $users.operator -}}
{{- end -}}
{{- if not $user.name -}}
{{- fail (printf "database.users.%s.name is empty: database.host wants a login for each role" .role) -}}
{{- end -}}
{{- if not $user.passwordSecret.name -}}
{{- fail (printf "database.users.%s.passwordSecret.name is empty: name the Secret with the password" .role) -}}
{{- end -}}
{{- toYaml $user -}}
{{- end }}

{{/* Environment: root, role, file (whether a connection string is read from a file at each connection, so that a new
     password needs no restart: for all that lives long). */}}
{{- define "rowlock.database.env" -}}
{{- $database := .root.Values.database -}}
{{- $secret := include "rowlock.database.secret" . | fromYaml -}}
{{- if and $secret .file }}
- {name: ROWLOCK_DSN_FILE, value: /etc/rowlock-database/dsn}
{{- else if $secret }}
- name: ROWLOCK_DSN
  valueFrom: {secretKeyRef: {name: {{ $secret.name }}, key: {{ $secret.key }}}}
{{- else }}
{{- $user := include "rowlock.database.user" . | fromYaml }}
- name: ROWLOCK_DSN
  value: {{ printf "host=%s port=%v dbname=%s" $database.host $database.port $database.name | quote }}
- {name: PGUSER, value: {{ $user.name | quote }}}
- name: PGPASSWORD
  valueFrom: {secretKeyRef: {name: {{ $user.passwordSecret.name }}, key: {{ $user.passwordSecret.key }}}}
{{- end }}
{{- if and (eq .role "node") $database.work.existingSecret .file }}
- {name: ROWLOCK_WORK_DSN_FILE, value: /etc/rowlock-work-database/dsn}
{{- else if and (eq .role "node") $database.work.existingSecret }}
- name: ROWLOCK_WORK_DSN
  valueFrom: {secretKeyRef: {name: {{ $database.work.existingSecret }}, key: {{ $database.work.existingSecretKey }}}}
{{- end }}
# What the connection string says about TLS wins over these.
- {name: PGSSLMODE, value: {{ ternary "disable" $database.sslMode .root.Values.demo.postgres.enabled }}}
{{- if not .root.Values.demo.postgres.enabled }}
- {name: PGSSLROOTCERT, value: {{ ternary "/etc/rowlock-tls/ca/ca.crt" $database.tls.caFile (ne $database.tls.caSecret.name "") | quote }}}
{{- if $database.tls.certSecret.name }}
- {name: PGSSLCERT, value: /etc/rowlock-tls/client/tls.crt}
- {name: PGSSLKEY, value: /etc/rowlock-tls/client/tls.key}
{{- end }}
{{- end }}
{{- end }}

{{- define "rowlock.database.volumes" -}}
{{- $tls := .root.Values.database.tls -}}
{{- $secret := include "rowlock.database.secret" . | fromYaml -}}
{{- $work := .root.Values.database.work -}}
{{- if and $secret .file }}
- name: database
  secret:
    secretName: {{ $secret.name }}
    defaultMode: 0444
    items:
    - {key: {{ $secret.key }}, path: dsn}
{{- end }}
{{- if and (eq .role "node") $work.existingSecret .file }}
- name: work-database
  secret:
    secretName: {{ $work.existingSecret }}
    defaultMode: 0444
    items:
    - {key: {{ $work.existingSecretKey }}, path: dsn}
{{- end }}
{{- if not .root.Values.demo.postgres.enabled }}
{{- if $tls.caSecret.name }}
- name: tls-ca
  secret:
    secretName: {{ $tls.caSecret.name }}
    items:
    - {key: {{ $tls.caSecret.key }}, path: ca.crt}
{{- end }}
{{- if $tls.certSecret.name }}
- name: tls-client
  # libpq wants a key that only root and a group can read: podSecurityContext.fsGroup makes it the pod's.
  secret: {secretName: {{ $tls.certSecret.name }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end }}

{{- define "rowlock.database.volumeMounts" -}}
{{- $tls := .root.Values.database.tls -}}
{{- if and .file (include "rowlock.database.secret" .) }}
- {name: database, mountPath: /etc/rowlock-database, readOnly: true}
{{- end }}
{{- if and .file (eq .role "node") .root.Values.database.work.existingSecret }}
- {name: work-database, mountPath: /etc/rowlock-work-database, readOnly: true}
{{- end }}
{{- if not .root.Values.demo.postgres.enabled }}
{{- if $tls.caSecret.name }}
- {name: tls-ca, mountPath: /etc/rowlock-tls/ca, readOnly: true}
{{- end }}
{{- if $tls.certSecret.name }}
- {name: tls-client, mountPath: /etc/rowlock-tls/client, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
