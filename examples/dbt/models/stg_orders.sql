select order_id, upper(customer) as customer, amount, ordered_on, updated_at
from {{ ref('raw_orders') }}
