{% macro create_database() %}
  {% do run_query("create database if not exists " ~ target.database) %}
{% endmacro %}
