-- What the bank should have paid, order by order, beside what its books say. The ledger, which
-- reference.sql has checked, says what is due.

WITH
due AS (
    SELECT
        carrier,
        to_char(flight_date, 'YYYY"H"') || ceil(extract(month FROM flight_date) / 6) AS half,
        sum(cents) AS cents
    FROM demo.ledger
    GROUP BY carrier, half
    HAVING sum(cents) > 0
),
paid AS (
    SELECT
        carrier,
        half,
        count(*) AS payments,
        sum(cents) AS cents
    FROM demo.bank
    GROUP BY carrier, half
)
SELECT
    carrier,
    half,
    coalesce(due.cents, 0)::bigint     AS due_cents,
    coalesce(paid.payments, 0)::bigint AS payments,
    coalesce(paid.cents, 0)::bigint    AS paid_cents
FROM due
FULL JOIN paid USING (carrier, half)
ORDER BY carrier, half
