//! The XML of requests and answers.

use std::fmt::Write as _;
use std::time::SystemTime;

use bytes::Bytes;
use quick_xml::Reader;
use quick_xml::escape::escape;
use quick_xml::events::Event;

use super::objects::{Failure, Object, Page, Unfinished};

const HEAD: &str = "<?xml version='1.0' encoding='UTF-8'?>";

/// An element with a text.
fn element(name: &str, text: &str) -> String {
    format!("<{name}>{}</{name}>", escape(text))
}

fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

pub(super) fn listing(bucket: &str, prefix: &str, page: &Page) -> Bytes {
    let mut xml = format!("{HEAD}<ListBucketResult>");
    xml += &element("Name", bucket);
    xml += &element("Prefix", prefix);
    xml += &element("KeyCount", &(page.objects.len() + page.folders.len()).to_string());
    xml += &element("IsTruncated", &page.next.is_some().to_string());
    if let Some(next) = &page.next {
        xml += &element("NextContinuationToken", next);
    }
    for (key, object) in &page.objects {
        let (key, etag) = (element("Key", key), element("ETag", &object.etag));
        let generation = element("Generation", &object.generation.to_string());
        let modified = element("LastModified", &time(object.modified));
        let size = element("Size", &object.data.len().to_string());
        // Writing to a string cannot fail.
        let _ = write!(xml, "<Contents>{key}{generation}{modified}{etag}{size}</Contents>");
    }
    for folder in &page.folders {
        let _ = write!(xml, "<CommonPrefixes>{}</CommonPrefixes>", element("Prefix", folder));
    }
    Bytes::from(xml + "</ListBucketResult>")
}

pub(super) fn uploads(bucket: &str, uploads: &[Unfinished]) -> Bytes {
    let mut xml = format!("{HEAD}<ListMultipartUploadsResult>{}", element("Bucket", bucket));
    xml += &element("IsTruncated", "false");
    for upload in uploads {
        let (key, id) = (element("Key", &upload.key), element("UploadId", &upload.id));
        let started = element("Initiated", &time(upload.started));
        let _ = write!(xml, "<Upload>{key}{id}{started}</Upload>");
    }
    Bytes::from(xml + "</ListMultipartUploadsResult>")
}

pub(super) fn started(bucket: &str, key: &str, upload: &str) -> Bytes {
    let (bucket, key) = (element("Bucket", bucket), element("Key", key));
    let upload = element("UploadId", upload);
    let name = "InitiateMultipartUploadResult";
    Bytes::from(format!("{HEAD}<{name}>{bucket}{key}{upload}</{name}>"))
}

pub(super) fn completed(bucket: &str, key: &str, etag: &str) -> Bytes {
    let (bucket, key) = (element("Bucket", bucket), element("Key", key));
    let etag = element("ETag", etag);
    let name = "CompleteMultipartUploadResult";
    Bytes::from(format!("{HEAD}<{name}>{bucket}{key}{etag}</{name}>"))
}

pub(super) fn copied(object: &Object) -> Bytes {
    let etag = element("ETag", &object.etag);
    let modified = element("LastModified", &time(object.modified));
    Bytes::from(format!("{HEAD}<CopyObjectResult>{modified}{etag}</CopyObjectResult>"))
}

pub(super) fn failure(failure: &Failure) -> Bytes {
    let (code, message) = failure.words();
    let (code, message) = (element("Code", code), element("Message", message));
    Bytes::from(format!("{HEAD}<Error>{code}{message}</Error>"))
}

pub(super) fn deleted(keys: &[String]) -> Bytes {
    let keys = keys.iter().map(|key| format!("<Deleted>{}</Deleted>", element("Key", key)));
    Bytes::from(format!("{HEAD}<DeleteResult>{}</DeleteResult>", keys.collect::<String>()))
}

/// The keys in the body of a deletion of many objects; `None` for anything else.
pub(super) fn keys(body: &[u8]) -> Option<Vec<String>> {
    let mut keys = Vec::new();
    elements(body, |name, text| {
        if name == b"Key" {
            keys.push(text.to_owned());
        }
        Some(())
    })?;
    Some(keys)
}

/// Number and ETag of each part in the body that completes an upload; `None` for anything else.
pub(super) fn parts(body: &[u8]) -> Option<Vec<(u32, String)>> {
    let (mut parts, mut number, mut etag) = (Vec::new(), None, String::new());
    elements(body, |name, text| {
        match name {
            b"PartNumber" => number = Some(text.trim().parse().ok()?),
            b"ETag" => text.trim().clone_into(&mut etag),
            b"Part" => parts.push((number.take()?, std::mem::take(&mut etag))),
            _ => {}
        }
        Some(())
    })?;
    Some(parts)
}

/// Calls a function at the end of every element with its name and its last text.
fn elements(body: &[u8], mut end: impl FnMut(&[u8], &str) -> Option<()>) -> Option<()> {
    let mut reader = Reader::from_str(std::str::from_utf8(body).ok()?);
    let mut text = String::new();
    loop {
        match reader.read_event().ok()? {
            Event::Start(_) => text.clear(),
            Event::Text(part) => text += &part.decode().ok()?,
            Event::GeneralRef(entity) => match entity.decode().ok()?.as_ref() {
                "quot" => text.push('"'),
                "amp" => text.push('&'),
                "lt" => text.push('<'),
                "gt" => text.push('>'),
                "apos" => text.push('\''),
                _ => return None,
            },
            Event::End(name) => end(name.name().as_ref(), &text)?,
            Event::Eof => return Some(()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_in_either_way_of_quoting() {
        let body = "<CompleteMultipartUpload><Part><ETag>\"a\"</ETag><PartNumber>1</PartNumber>\
                    </Part><Part><PartNumber>2</PartNumber><ETag>&quot;b&quot;</ETag></Part>\
                    </CompleteMultipartUpload>";
        let expected = vec![(1, "\"a\"".to_owned()), (2, "\"b\"".to_owned())];
        assert_eq!(parts(body.as_bytes()), Some(expected));
        assert_eq!(parts(b"<Part><ETag>\"a\"</ETag></Part>"), None, "no number");
        assert_eq!(parts(b"<Part>"), Some(Vec::new()), "the upload then misses its parts");
    }

    #[test]
    fn names_are_escaped() {
        let xml = started("b", "a<&>", "u");
        assert!(xml.windows(16).any(|part| part == b"<Key>a&lt;&amp;&"));
    }
}
