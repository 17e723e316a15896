//! Secrets in URLs.

use std::borrow::Cow;

/// The text with every URL in it reduced to what is not secret: no user info, no query and no
/// fragment, where passwords, signatures and tokens are. Applying it twice changes nothing.
///
/// ```
/// use dcp_core::text::without_secrets;
///
/// assert_eq!(without_secrets("https://me:pw@host/run?sig=x"), "https://…@host/run?…");
/// ```
#[must_use]
pub fn without_secrets(text: &str) -> Cow<'_, str> {
    if !text.contains("://") {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + 3);
        out.push_str(before);
        let end = url.find(ends_url).unwrap_or(url.len());
        let (url, after) = url.split_at(end);
        let authority_end = url.find(['/', '?', '#']).unwrap_or(url.len());
        let (authority, path) = url.split_at(authority_end);
        match authority.rsplit_once('@') {
            // In `abfs://container@account/`, what is before the `@` is a name. A password has a
            // colon before it.
            Some((user, _)) if before.ends_with("abfs://") && !user.contains(':') => {
                out.push_str(authority);
            }
            Some((user, _)) if before.ends_with("abfss://") && !user.contains(':') => {
                out.push_str(authority);
            }
            Some((_, host)) => {
                out.push_str("…@");
                out.push_str(host);
            }
            None => out.push_str(authority),
        }
        match path.find(['?', '#']) {
            Some(query) => {
                out.push_str(&path[..query]);
                out.push_str("?…");
            }
            None => out.push_str(path),
        }
        rest = after;
    }
    out.push_str(rest);
    Cow::Owned(out)
}

fn ends_url(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '<' | '>' | '`')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_info_and_queries_are_removed_and_nothing_else() {
        for (text, expected) in [
            ("no URL: a@b?c=d", "no URL: a@b?c=d"),
            ("s3://bucket/run", "s3://bucket/run"),
            ("https://user:pw@host/a?sig=S#x", "https://…@host/a?…"),
            ("GET https://h?token=T after 3", "GET https://h?… after 3"),
            ("abfs://container@account/x?sv=1", "abfs://container@account/x?…"),
            ("abfs://c:pw@account/x", "abfs://…@account/x"),
            ("\"http://a@b/c\" http://d/e?f", "\"http://…@b/c\" http://d/e?…"),
            ("http://p@ss@host/", "http://…@host/"),
        ] {
            assert_eq!(without_secrets(text), expected, "{text}");
            assert_eq!(without_secrets(expected), expected, "twice: {text}");
        }
    }
}
