//! `meridian.toml` and model families: any text is taken or refused in one line.

use meridian_core::{MeridianConfig, ModelFamily};

/// Parse `data` as a configuration in TOML and in JSON, and as a family.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match MeridianConfig::parse(text) {
        Ok(parsed) => parsed.config.validate().expect("what was parsed is valid"),
        Err(error) => crate::assert_one_line(&error.to_string()),
    }
    match MeridianConfig::from_json(text) {
        Ok(config) => config.validate().expect("what was parsed is valid"),
        Err(error) => crate::assert_one_line(&error.to_string()),
    }
    if let Err(error) = ModelFamily::from_toml("family.toml", text) {
        crate::assert_one_line(&error.to_string());
    }
}
