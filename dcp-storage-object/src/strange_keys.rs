//! Entries of lists whose names are no paths, such as those with a control character or an empty segment.
//! `object_store` refuses the whole list for one of them.

/// Elements of lists of S3, Google Cloud Storage and Azure, with the element of their name.
const ENTRIES: &[(&str, &str)] =
    &[("Contents", "Key"), ("CommonPrefixes", "Prefix"), ("Blob", "Name"), ("BlobPrefix", "Name")];

/// A list without such entries; `None` if it has none.
pub(crate) fn without(xml: &str) -> Option<String> {
    let mut made: Option<String> = None;
    for (entry, name) in ENTRIES {
        let text = made.as_deref().unwrap_or(xml);
        if let Some(shorter) = without_entries(text, entry, name) {
            made = Some(shorter);
        }
    }
    made
}

fn without_entries(xml: &str, entry: &str, name: &str) -> Option<String> {
    let (open, close) = (format!("<{entry}>"), format!("</{entry}>"));
    let (mut made, mut at, mut kept) = (String::new(), 0, 0);
    while let Some(start) = xml.get(at..)?.find(&open).map(|found| at + found) {
        let end = start + xml.get(start..)?.find(&close)? + close.len();
        let text = between(xml.get(start..end)?, name).unwrap_or_default();
        if !is_path(text) {
            let shown = dcp_core::text::beginning(text, 200);
            tracing::warn!(key = ?shown, "an object is left out whose key is no path");
            made.push_str(xml.get(kept..start)?);
            kept = end;
        }
        at = end;
    }
    made.push_str(xml.get(kept..)?);
    (kept > 0).then_some(made)
}

fn between<'a>(entry: &'a str, name: &str) -> Option<&'a str> {
    let (_, after) = entry.split_once(&format!("<{name}>"))?;
    Some(after.split_once(&format!("</{name}>"))?.0)
}

/// Whether a name, as XML has it, is a path of `object_store`.
fn is_path(name: &str) -> bool {
    let path = name.strip_prefix('/').unwrap_or(name);
    let inner = path.strip_suffix('/').unwrap_or(path);
    let is_segment = |segment: &str| !matches!(segment, "" | "." | "..");
    (path.is_empty() || inner.split('/').all(is_segment))
        && !name.chars().any(|c| c.is_ascii_control())
        && !name.split("&#").skip(1).any(is_control)
}

/// Whether a reference to a character, behind its `&#`, is one to a control character.
fn is_control(reference: &str) -> bool {
    let number = reference.split(';').next().unwrap_or_default();
    let code = match number.strip_prefix(['x', 'X']) {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => number.parse(),
    };
    code.is_ok_and(|code| code < 0x20 || code == 0x7f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_whose_name_is_no_path_is_left_out() {
        let entry = |key: &str| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
        let prefix = |key: &str| format!("<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>");
        let list = |entries: &[String]| format!("<List>{}</List>", entries.concat());
        let good = ["a", "a b/&amp;&lt;", "a&#x20;b", "a&#233;", "/a/", "...", "é/ü"];
        assert_eq!(without(&list(&good.map(entry))), None);
        for bad in ["a&#x1;b", "a&#10;", "a&#X7f;", "a//b", "a/./b", "../a", "a\u{1}", "//"] {
            let mixed = list(&[entry("a"), entry(bad), entry(bad), prefix(bad), entry("b")]);
            assert_eq!(without(&mixed), Some(list(&[entry("a"), entry("b")])), "{bad}");
        }
        let azure = "<Blobs><Blob><Name>a&#1;</Name></Blob><BlobPrefix><Name>b/</Name></BlobPrefix></Blobs>";
        let kept = "<Blobs><BlobPrefix><Name>b/</Name></BlobPrefix></Blobs>";
        assert_eq!(without(azure).as_deref(), Some(kept));
        for odd in ["", "<Contents>", "<Contents><Key>", "</Contents><Contents></Contents>"] {
            without(odd);
        }
    }
}
