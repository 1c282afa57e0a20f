select order_id, upper(customer) as customer, amount::number(12, 2) as amount, ordered_on, updated_at::timestamp_ntz as updated_at,
       case when paid then 'paid' else 'open' end as status
from {{ ref('raw_orders') }}
