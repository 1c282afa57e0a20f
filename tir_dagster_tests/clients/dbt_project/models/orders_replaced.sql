{{ config(materialized='incremental', unique_key=['order_id', 'ordered_on'], incremental_strategy='delete+insert', on_schema_change='append_new_columns') }}
select * {% if var('wide', false) %}, 'shop' as channel {% endif %} from {{ ref('stg_orders') }}
{% if is_incremental() %} where updated_at > (select max(updated_at) from {{ this }}) {% endif %}
