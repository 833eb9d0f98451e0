//! The tables of `meridian.toml` as JSON, the form in which Python passes a configuration.

use serde_json::Value;

use super::schema::{may_be_infinite, schema};
use super::{joined, one_line};
use crate::Error;

/// The JSON text of a whole configuration as the table of the equivalent TOML.
pub(super) fn table(text: &str) -> Result<toml::Table, Error> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let parsed: Result<Value, _> = serde_path_to_error::deserialize(&mut reader);
    let value = parsed.map_err(|error| not_json(&error.path().to_string(), error.inner()))?;
    reader.end().map_err(|error| not_json(".", &error))?;
    match convert("", schema(), value)? {
        toml::Value::Table(table) => Ok(table),
        other => Err(syntax("configuration", format!("invalid type: {}, expected a table", other.type_str()))),
    }
}

fn not_json(path: &str, error: &serde_json::Error) -> Error {
    let at = format!("line {}, column {}", error.line(), error.column());
    let reason = one_line(&error.to_string());
    let reason =
        reason.strip_suffix(&format!(" at line {} column {}", error.line(), error.column())).unwrap_or(&reason);
    // "?" is the place where the text broke off.
    let path = one_line(path);
    syntax(if matches!(path.as_str(), "." | "?") { &at } else { &path }, reason.to_owned())
}

fn syntax(field: &str, reason: String) -> Error {
    Error::ConfigSyntax { field: field.to_owned(), reason }
}

fn convert(path: &str, schema: &Value, value: Value) -> Result<toml::Value, Error> {
    Ok(match value {
        // JSON has no infinity, and serde writes null for it.
        Value::Null if may_be_infinite(schema) => f64::INFINITY.into(),
        Value::Null => return Err(syntax(path, "invalid type: null, expected a value".into())),
        Value::Bool(value) => value.into(),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(integer), _) => integer.into(),
            (None, Some(float)) if !number.is_u64() => float.into(),
            _ => return Err(syntax(path, format!("{number}: must fit a signed integer of 64 bits"))),
        },
        Value::String(text) => match text.as_str() {
            "NaN" if schema["type"] == "number" => f64::NAN.into(),
            "Infinity" if schema["type"] == "number" => f64::INFINITY.into(),
            "-Infinity" if schema["type"] == "number" => f64::NEG_INFINITY.into(),
            _ => text.into(),
        },
        Value::Array(items) => {
            let convert = |(index, item)| convert(&format!("{path}[{index}]"), &Value::Null, item);
            toml::Value::Array(items.into_iter().enumerate().map(convert).collect::<Result<_, _>>()?)
        }
        Value::Object(fields) => {
            let convert = |(key, value): (String, Value)| {
                let named = schema.get("additionalProperties").filter(|named| named.is_object());
                let inner = named.unwrap_or(&schema["properties"][&key]);
                let value = convert(&joined(path, &key), inner, value)?;
                Ok((key, value))
            };
            toml::Value::Table(fields.into_iter().map(convert).collect::<Result<_, Error>>()?)
        }
    })
}
