-- What the ledger must say, day by day, beside what it says. Written from the rule in DATA.md and not
-- from the code of the jobs: it reads demo.flights, and reads demo.ledger only to count and add up.
-- A day of a ledger row is the day of its flight, whatever the row itself says.

WITH
tariff (miles, full_amount) AS (
    VALUES
        (int4range(NULL, 932, '[]'), 332.03),
        (int4range(933, 2175, '[]'), 531.24),
        (int4range(2176, NULL),      796.86)
),
lateness (minutes, share) AS (
    VALUES
        (int4range(60, 120),   0.10),
        (int4range(120, 180),  0.50),
        (int4range(180, NULL), 1.00)
),
due AS (
    SELECT
        flights.flight_id,
        flights.flight_date,
        flights.carrier,
        -- numeric throughout; its round() takes halves away from zero
        100 * round(coalesce(planes.seats, 100) * 0.8) * round(
            tariff.full_amount * CASE
                WHEN flights.departure_delay IS NULL THEN 1.00
                WHEN flights.arrival_delay IS NULL THEN 0.75
                ELSE coalesce(lateness.share, 0.00)
            END,
            2
        ) AS cents
    FROM demo.flights
    JOIN tariff ON tariff.miles @> flights.distance_miles
    LEFT JOIN lateness ON lateness.minutes @> flights.arrival_delay
    LEFT JOIN demo.planes USING (tail_number)
    WHERE %(month)s::integer IS NULL OR extract(month FROM flights.flight_date) = %(month)s
),
reference AS (
    SELECT
        flight_date,
        count(*) AS flights,
        count(*) FILTER (WHERE cents > 0) AS claims,
        sum(cents) AS cents
    FROM due
    GROUP BY flight_date
),
ledger AS (
    SELECT
        flights.flight_date,
        count(*) AS entries,
        count(DISTINCT ledger.flight_id) AS flights,
        count(*) FILTER (WHERE ledger.cents > 0) AS claims,
        sum(ledger.cents) AS cents
    FROM demo.ledger
    LEFT JOIN demo.flights USING (flight_id)    -- an entry for no flight makes a day without a date
    GROUP BY flights.flight_date
),
-- Two errors that cancel each other out in the sum of a day are still two.
wrong AS (
    SELECT due.flight_date, count(*) AS entries
    FROM due
    JOIN demo.ledger USING (flight_id)
    WHERE ledger.cents <> due.cents
        OR ledger.carrier <> due.carrier
        OR ledger.flight_date <> due.flight_date
    GROUP BY due.flight_date
)
SELECT
    flight_date,
    coalesce(reference.flights, 0)::bigint AS reference_flights,
    coalesce(reference.claims, 0)::bigint  AS reference_claims,
    coalesce(reference.cents, 0)::bigint   AS reference_cents,
    coalesce(ledger.entries, 0)::bigint    AS ledger_entries,
    coalesce(ledger.flights, 0)::bigint    AS ledger_flights,
    coalesce(ledger.claims, 0)::bigint     AS ledger_claims,
    coalesce(ledger.cents, 0)::bigint      AS ledger_cents,
    coalesce(wrong.entries, 0)::bigint     AS wrong_entries
FROM reference
FULL JOIN ledger USING (flight_date)
LEFT JOIN wrong USING (flight_date)
ORDER BY flight_date
