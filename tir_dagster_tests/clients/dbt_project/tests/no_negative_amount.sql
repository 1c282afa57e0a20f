select * from {{ ref('orders_merged') }} where amount < 0
