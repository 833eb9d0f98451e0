//! TOML texts, with errors that name the dotted field if there is one.

use serde::de::DeserializeOwned;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::{joined, line_and_column, one_line};
use crate::Error;

/// Deserialize a TOML text.
///
/// ```
/// use std::collections::BTreeMap;
/// use meridian_core::config::from_toml;
///
/// let error = from_toml::<BTreeMap<String, u32>>("a = 1\nb = 99999999999999999999").unwrap_err();
/// assert_eq!(error.to_string(), "b: 99999999999999999999: must fit a signed integer of 64 bits");
/// let error = from_toml::<BTreeMap<String, u32>>("a = 'x'").unwrap_err();
/// assert_eq!(error.to_string(), "a: invalid type: string \"x\", expected u32");
/// ```
///
/// # Errors
/// [`Error::ConfigSyntax`] in one line: the dotted field, or line and column if the text is not TOML; the value, and
/// what was expected.
pub fn from_toml<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    from_table(table(text)?)
}

/// Deserialize a table.
///
/// # Errors
/// As [`from_toml`].
pub fn from_table<T: DeserializeOwned>(table: Table) -> Result<T, Error> {
    serde_path_to_error::deserialize(Value::Table(table)).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { "the file".to_owned() } else { one_line(&path) };
        Error::ConfigSyntax { field, reason: one_line(error.inner().message()) }
    })
}

/// The text as a table.
///
/// # Errors
/// As [`from_toml`].
pub fn table(text: &str) -> Result<Table, Error> {
    let parsed = DeTable::parse(text).map_err(|error| {
        let reason = one_line(error.message());
        Error::ConfigSyntax { field: line_and_column(text, &error), reason }
    })?;
    converted_table("", parsed.into_inner())
}

fn converted_table(path: &str, table: DeTable<'_>) -> Result<Table, Error> {
    let convert = |(key, value): (toml::Spanned<_>, toml::Spanned<DeValue<'_>>)| {
        let key: String = std::borrow::Cow::<str>::into_owned(key.into_inner());
        let value = converted(&joined(path, &key), value.into_inner())?;
        Ok((key, value))
    };
    table.into_iter().map(convert).collect()
}

/// Numbers are still text here: TOML's own error for a number that does not fit names no field.
fn converted(path: &str, value: DeValue<'_>) -> Result<Value, Error> {
    // TOML's reader accepts any text that starts like a number.
    let unfit = |number: &str, reason: &str| {
        let cut = number.char_indices().nth(40).map_or(number.to_owned(), |(end, _)| format!("{}...", &number[..end]));
        let value = one_line(&cut);
        Error::ConfigValidation { field: path.to_owned(), value, reason: reason.to_owned() }
    };
    Ok(match value {
        DeValue::String(text) => Value::String(text.into_owned()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(integer) => Value::Integer(integer),
            Err(_) => return Err(unfit(&number.to_string(), "must fit a signed integer of 64 bits")),
        },
        DeValue::Float(number) => match number.as_str().parse::<f64>() {
            Ok(float) if float.is_finite() || number.as_str().contains(['i', 'n']) => Value::Float(float),
            _ => return Err(unfit(&number.to_string(), "must fit a number of 64 bits")),
        },
        DeValue::Boolean(value) => Value::Boolean(value),
        DeValue::Datetime(value) => Value::Datetime(value),
        DeValue::Array(items) => {
            let convert = |(index, item): (usize, toml::Spanned<DeValue<'_>>)| {
                converted(&format!("{path}[{index}]"), item.into_inner())
            };
            Value::Array(items.into_iter().enumerate().map(convert).collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => Value::Table(converted_table(path, table)?),
    })
}
