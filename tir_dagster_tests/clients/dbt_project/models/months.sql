{{ config(materialized='table') }}
select date_trunc('month', ordered_on) as month, count(*) as orders, sum(amount) as amount
from {{ ref('stg_orders') }} group by 1
