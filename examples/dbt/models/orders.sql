-- A merge changes the table that is there, so that its history says which keys changed; a transient table, dbt's default,
-- would keep that history for a day at most.
{{ config(materialized='incremental', unique_key='order_id', transient=false) }}

select * from {{ ref('stg_orders') }}
{% if is_incremental() %}
where updated_at > (select max(updated_at) from {{ this }})
{% endif %}
