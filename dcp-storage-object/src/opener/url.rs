//! The bucket and the folder that a URL names.

use dcp_core::StorageError;
use dcp_core::text::{Quoted, without_secrets};

use super::{SCHEMES, invalid};
use crate::provider::Provider;

/// A folder of a store.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) provider: Provider,
    /// The bucket; a container, with `@` and the host of its account where the URL has it; the
    /// whole URL of a web server, which may have secrets; a name of memory.
    pub(super) root: String,
    pub(super) prefix: String,
}

impl Place {
    pub(super) fn parse(url: &str) -> Result<Self, StorageError> {
        let refuse = |reason| {
            let url = without_secrets(url);
            Err(invalid(format!("{} {reason}", Quoted(&url))))
        };
        let Some((scheme, rest)) = url.split_once("://") else {
            return refuse("is not a URL");
        };
        let Some((_, provider)) = SCHEMES.iter().find(|(known, _)| *known == scheme) else {
            return refuse("has a scheme that this build does not open");
        };
        let provider = *provider;
        if provider == Provider::Http {
            return Ok(Self { provider, root: url.to_owned(), prefix: String::new() });
        }
        if rest.contains(['?', '#']) {
            return refuse("has a query or a fragment; pass settings as options");
        }
        let (root, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let has_user = match provider {
            Provider::Azure => root.split('@').next().is_some_and(|user| user.contains(':')),
            _ => root.contains('@'),
        };
        if has_user {
            return refuse("has a user or a password; pass credentials as options");
        }
        if root.is_empty() && provider != Provider::Memory {
            return refuse("names no bucket");
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || "._-$:@".contains(c);
        if provider != Provider::Memory && !root.chars().all(is_name) {
            return refuse("has a character in the name of the bucket that no store allows");
        }
        let prefix = prefix.trim_matches('/').to_owned();
        Ok(Self { provider, root: root.to_owned(), prefix })
    }
}
