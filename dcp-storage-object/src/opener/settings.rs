//! The settings of a provider by name: environment variables, and options, which have precedence.

use dcp_core::StorageError;
use dcp_core::registry::StorageOptions;

use super::invalid;

/// A way to have credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) name: &'static str,
    /// Whether an option of this way is enough to replace variables of another.
    pub(super) is_whole: bool,
}

#[cfg(any(feature = "s3", feature = "gcs", feature = "azure"))]
impl Way {
    pub(super) const fn whole(name: &'static str) -> Self {
        Self { name, is_whole: true }
    }

    /// Of a setting that is nothing by itself, or says that there are no credentials.
    pub(super) const fn part(name: &'static str) -> Self {
        Self { name, is_whole: false }
    }
}

/// The variables with a prefix, and behind them the options. `object_store` uses the first way to
/// have credentials that is set, so where options have one, variables of another are left out.
///
/// # Errors
///
/// [`Invalid`](dcp_core::StorageErrorKind::Invalid) for a value that no header of a request can have.
pub(super) fn merged(
    prefix: &str,
    variables: impl Iterator<Item = (String, String)>,
    options: &StorageOptions,
    way: fn(&str) -> Option<Way>,
) -> Result<Vec<(String, String)>, StorageError> {
    let chosen = options.iter().filter_map(|(name, _)| way(name)).find(|way| way.is_whole);
    let mut merged = Vec::new();
    for (variable, value) in variables.filter(|(name, _)| name.starts_with(prefix)) {
        let name = variable.to_ascii_lowercase();
        let is_replaced = chosen.is_some_and(|chosen| way(&name).is_some_and(|way| way != chosen));
        // Programs of the providers take an empty variable for one that is not set.
        if !is_replaced && !value.trim().is_empty() {
            let value = checked(&name, value, || format!("the variable {variable}"))?;
            merged.push((name, value));
        }
    }
    for (name, value) in options.iter() {
        let value = checked(name, value.to_owned(), || format!("the storage option {name}"))?;
        merged.push((name.to_owned(), value));
    }
    Ok(merged)
}

/// A value without space around it, as files of secrets often end in a newline.
pub(super) fn checked(
    name: &str,
    value: String,
    shown: impl Fn() -> String,
) -> Result<String, StorageError> {
    let value = value.trim().to_owned();
    let is_text = ["certificate", "service_account"].iter().any(|text| name.contains(text));
    let is_path = ["_file", "_path", "credentials"].iter().any(|end| name.ends_with(end));
    let is_right = |c: char| is_text || matches!(c, ' '..='~') || (is_path && !c.is_control());
    match value.chars().all(is_right) {
        true => Ok(value),
        false => Err(invalid(format!(
            "{} has a control character, or a letter that is not ASCII, which a request cannot have; \
             set it again without",
            shown()
        ))),
    }
}

/// Checks that a setting is an address which requests can have.
#[cfg(any(feature = "s3", feature = "gcs", feature = "azure"))]
pub(super) fn check_url(name: &str, url: Option<String>) -> Result<(), StorageError> {
    let Some(url) = url else { return Ok(()) };
    let parsed = reqwest::Url::parse(&url).ok();
    let is_web = parsed.is_some_and(|url| matches!(url.scheme(), "http" | "https"));
    match is_web && url.parse::<http::Uri>().is_ok() {
        true => Ok(()),
        false => Err(invalid(format!(
            "the setting {name} is no URL of a web server: it has the form https://HOST or http://HOST:PORT"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(name: &str) -> Option<Way> {
        match name {
            "x_key" => Some(Way::whole("key")),
            "x_sas" => Some(Way::whole("sas")),
            "x_token" => Some(Way::part("token")),
            _ => None,
        }
    }

    fn merge(variables: &[(&str, &str)], options: &[(&str, &str)]) -> Result<String, StorageError> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let options = options.iter().copied().collect();
        let merged = merged("X_", variables.iter().map(owned), &options, way)?;
        let shown = merged.iter().map(|(name, value)| format!("{name}={value}"));
        Ok(shown.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn an_option_replaces_variables_of_another_way_to_have_credentials() {
        let variables = [("X_KEY", "1"), ("X_TOKEN", "2"), ("X_HOST", "3"), ("Y_SAS", "4")];
        let merged = |options: &[(&str, &str)]| merge(&variables, options).unwrap();
        assert_eq!(merged(&[]), "x_key=1 x_token=2 x_host=3");
        assert_eq!(merged(&[("x_sas", "5")]), "x_host=3 x_sas=5");
        assert_eq!(merged(&[("x_key", "5")]), "x_key=1 x_host=3 x_key=5");
        assert_eq!(merged(&[("x_token", "5")]), "x_key=1 x_token=2 x_host=3 x_token=5");
        assert_eq!(merged(&[("x_host", "5")]), "x_key=1 x_token=2 x_host=3 x_host=5");
    }

    #[test]
    fn values_are_trimmed_and_those_that_no_header_has_are_refused_by_name() {
        assert_eq!(
            merge(&[("X_KEY", " a b\n"), ("X_HOST", "\n")], &[("x_sas", "\tc\r\n")]).unwrap(),
            "x_sas=c"
        );
        assert_eq!(merge(&[("X_KEY", " a b\n"), ("X_HOST", "\n")], &[]).unwrap(), "x_key=a b");
        for bad in ["5ec7\n7e7", "5ec7\u{1}7e7", "5ec7\u{7f}", "5ec7é", "5ec7\u{85}7"] {
            for (variables, options, name) in
                [(vec![("X_KEY", bad)], vec![], "X_KEY"), (vec![], vec![("x_key", bad)], "x_key")]
            {
                let error = merge(&variables, &options).unwrap_err().to_string();
                assert!(error.contains(name) && !error.contains("5ec7"), "{error}");
            }
        }
        merge(&[("X_SERVICE_ACCOUNT_KEY", "{\n\"a\": \"é\"}"), ("X_TOKEN_FILE", "/é")], &[])
            .unwrap();
        merge(&[("X_TOKEN_FILE", "/a\nb")], &[]).unwrap_err();
    }
}
