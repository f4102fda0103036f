-- The tables of the demonstration. The loader runs this file, and drops the schema only if it bears
-- the comment at the end.

CREATE SCHEMA demo;

CREATE TABLE demo.carriers (
    carrier text PRIMARY KEY,
    name    text NOT NULL
);

CREATE TABLE demo.planes (
    tail_number text PRIMARY KEY,
    seats       integer NOT NULL CHECK (seats > 0)
);

CREATE TABLE demo.flights (
    flight_id           integer NOT NULL,   -- primary key: added after the load, which it would slow
    flight_date         date    NOT NULL,
    carrier             text    NOT NULL,
    number              integer NOT NULL,
    origin              text    NOT NULL,
    destination         text    NOT NULL,
    distance_miles      integer NOT NULL CHECK (distance_miles > 0),
    scheduled_departure integer NOT NULL,   -- local time as HHMM
    tail_number         text,
    departure_delay     integer,            -- minutes; NULL: cancelled
    arrival_delay       integer,            -- minutes; NULL: cancelled or diverted
    CHECK (departure_delay IS NOT NULL OR arrival_delay IS NULL)
);

-- One row for each settled flight. No unique key on flight_id, on purpose: nothing but rowlock keeps
-- a flight from being settled twice, and the check must be able to see it if it happens.
CREATE TABLE demo.ledger (
    flight_id   integer  NOT NULL,
    flight_date date     NOT NULL,
    carrier     text     NOT NULL,
    reason      text     NOT NULL CHECK (reason IN ('on time', 'late', 'cancelled', 'diverted')),
    cents       bigint   NOT NULL CHECK (cents >= 0),
    attempt     smallint NOT NULL           -- the attempt at the partition that wrote the row
);

-- The books of the bank, which stands for a system outside: the payout job reaches it over a
-- connection of its own, outside any transaction of rowlock. It pays every order that it gets: no
-- unique key on reference, for the same reason as above.
CREATE TABLE demo.bank (
    payment_id bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    reference  text        NOT NULL,        -- the idempotency key of the attempt
    carrier    text        NOT NULL,
    half       text        NOT NULL,
    cents      bigint      NOT NULL CHECK (cents > 0),
    paid_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON SCHEMA demo IS 'rowlock demonstration; dropped and made again by each load';
