//! Renders a report as an HTML page.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::Report;

const TEMPLATE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = concat!(
    "(() => {\n\"use strict\";\n",
    include_str!("page/base.js"),
    include_str!("page/values.js"),
    include_str!("page/charts.js"),
    include_str!("page/numbers.js"),
    include_str!("page/tree.js"),
    include_str!("page/detail.js"),
    include_str!("page/main.js"),
    "})();\n"
);

/// SHA-256 of [`STYLE`] and [`SCRIPT`] in Base64. A test checks them.
const STYLE_SHA256: &str = "65m861G/h2dca7O2yp2NfN76CUkSdhubBtBdmd6kihQ=";
const SCRIPT_SHA256: &str = "/6W9IbaYoDtCaXwYreAwvv5ewFH2wjLTE3BFVXMMUis=";

/// Renders the report as one HTML page that loads nothing and runs no script but its own.
///
/// Texts of a checkpoint stay data: they are embedded as JSON that cannot end its element, and the
/// script creates only text nodes from them. The content security policy allows the page's one
/// style and one script, by their hashes.
#[must_use]
pub fn render_html(report: &Report) -> String {
    let data = serde_json::to_string(report).unwrap_or_default();
    let data = visible(&data).replace('<', "\\u003c");
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{STYLE_SHA256}'; \
         script-src 'sha256-{SCRIPT_SHA256}'; base-uri 'none'; form-action 'none'"
    );
    let title = escaped(&dcp_core::text::escaped(&report.name));
    let mut page = String::with_capacity(TEMPLATE.len() + STYLE.len() + SCRIPT.len() + data.len());
    // One pass over the template, so that inserted text is never expanded again.
    let mut rest = TEMPLATE;
    while let Some((before, behind)) = rest.split_once('{') {
        page.push_str(before);
        let (name, after) = behind.split_once('}').unwrap_or((behind, ""));
        let put_in: Cow<'_, str> = match name {
            "policy" => policy.as_str().into(),
            "title" => title.as_str().into(),
            "style" => STYLE.into(),
            "data" => data.as_str().into(),
            "script" => SCRIPT.into(),
            other => format!("{{{other}}}").into(),
        };
        page.push_str(&put_in);
        rest = after;
    }
    page.push_str(rest);
    page
}

/// Escapes invisible characters and those that change the writing direction in JSON strings.
fn visible(json: &str) -> Cow<'_, str> {
    let hidden = |c: char| !c.is_ascii_control() && dcp_core::text::is_unsafe(c) || c == '\x7f';
    if !json.contains(hidden) {
        return Cow::Borrowed(json);
    }
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if hidden(c) {
            let _ = write!(out, "\\{}", c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Escapes text for use between tags.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c if c.is_control() => {
                let _ = write!(out, "&#xFFFD;");
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use indexmap::IndexMap;
    use serde_json::json;
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::inspect::{KeySummary, Summary};
    use crate::report::ReportLimits;

    #[test]
    fn what_cannot_be_seen_is_shown_as_an_escape() {
        let json = serde_json::json!({ "a\u{202e}": "\u{200b}\x7f\x1b é" }).to_string();
        let shown: serde_json::Value = serde_json::from_str(&visible(&json)).unwrap();
        assert_eq!(shown["a\\u{202e}"], "\\u{200b}\\u{7f}\x1b é");
    }

    #[test]
    fn the_policy_has_the_hashes_of_style_and_script() {
        let hash = |text: &str| STANDARD.encode(Sha256::digest(text));
        assert_eq!(
            (STYLE_SHA256, SCRIPT_SHA256),
            (hash(STYLE).as_str(), hash(SCRIPT).as_str()),
            "put the right-hand side into the constants"
        );
        assert!(!STYLE.contains("</style") && !SCRIPT.contains("</script"));
    }

    #[test]
    fn no_text_of_a_checkpoint_breaks_out() {
        let hostile = "</script><img src=x onerror=alert(1)><!--{script}{data}&";
        let summary = Summary {
            unfinished: Vec::new(),
            callables: Vec::new(),
            sidecar: None,
            format: hostile.to_owned(),
            keys: IndexMap::from([(
                hostile.into(),
                KeySummary::Object { value: json!({ hostile: hostile }) },
            )]),
            files: IndexMap::from([(hostile.to_owned(), None)]),
            version: None,
            paths: IndexMap::new(),
        };
        let report = Report::of(hostile, &summary, &ReportLimits::default());
        let page = render_html(&report);
        let (head, behind) = page.split_once("id=\"report\">").unwrap();
        let (data, script) = behind.split_once("</script>").unwrap();
        assert!(!data.contains('<'));
        let parsed: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(parsed, serde_json::to_value(&report).unwrap());
        assert_eq!(parsed["keys"][0]["name"], hostile);
        assert!(head.contains("<title>&lt;/script&gt;&lt;img"));
        let scripts = |part: &str| part.matches("<script").count();
        assert_eq!((scripts(head), scripts(script)), (1, 1), "the data, and the page's own");
    }
}
