//! URIs: their folders and names.

use std::path::Path;

/// The folder that a URI is in, and its name there; none for a root, such as a bucket.
pub(crate) fn split(uri: &str) -> Option<(String, String)> {
    let (scheme, path) = match uri.split_once("://") {
        Some((scheme, path)) => (format!("{scheme}://"), path),
        None => (String::new(), uri),
    };
    let path = path.trim_end_matches('/');
    if !path.contains('/') && !matches!(&*scheme, "" | "file://") {
        return None;
    }
    let (parent, name) = match path.rsplit_once('/') {
        Some(("", name)) => ("/", name),
        Some((parent, name)) => (parent, name),
        None => (".", path),
    };
    (!name.is_empty()).then(|| (format!("{scheme}{parent}"), name.to_owned()))
}

/// The path that a URI is, if it is that of a local file system.
pub(crate) fn local_path(uri: &str) -> Option<&Path> {
    match uri.split_once("://") {
        Some(("file", path)) => Some(Path::new(path)),
        Some(_) => None,
        None => Some(Path::new(uri)),
    }
}

/// The URI of `name` in the folder `uri`.
pub(crate) fn below(uri: &str, name: &str) -> String {
    format!("{}/{name}", uri.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    #[test]
    fn uris_split_into_folder_and_name() {
        let split = |uri| super::split(uri).unwrap();
        assert_eq!(split("a/b.npy"), ("a".into(), "b.npy".into()));
        assert_eq!(split("b.npy"), (".".into(), "b.npy".into()));
        assert_eq!(split("/b"), ("/".into(), "b".into()));
        assert_eq!(split("file:///x/y/"), ("file:///x".into(), "y".into()));
        assert_eq!(split("s3://bucket/x"), ("s3://bucket".into(), "x".into()));
        assert!(super::split("/").is_none());
        assert!(super::split("s3://bucket").is_none() && super::split("s3://bucket/").is_none());
    }
}
