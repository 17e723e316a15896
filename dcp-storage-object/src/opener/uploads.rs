//! The open uploads of a bucket, which `object_store` does not list. S3 and Google Cloud Storage answer
//! in the same XML.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use dcp_core::storage::LeftoverAction;
use object_store::client::{HttpClient, HttpRequest};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{Error, Result};
use serde::Deserialize;

use crate::error::INVALID_LIST;
use crate::native::{MinAge, OpenUpload, OpenUploads};

/// Makes the requests of a provider, with its credentials.
#[async_trait]
pub(super) trait UploadRequests: fmt::Debug + Send + Sync {
    /// A GET of the bucket with a query.
    async fn request(&self, query: &[(&str, &str)]) -> Result<HttpRequest>;
}

/// The open uploads of a bucket.
pub(super) struct XmlUploads {
    pub(super) store: Arc<dyn MultipartStore>,
    pub(super) requests: Box<dyn UploadRequests>,
    pub(super) http: HttpClient,
    /// Of the provider, for errors.
    pub(super) name: &'static str,
}

impl fmt::Debug for XmlUploads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XmlUploads").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Page {
    #[serde(default)]
    is_truncated: bool,
    #[serde(default)]
    next_key_marker: String,
    #[serde(default)]
    next_upload_id_marker: String,
    #[serde(default, rename = "Upload")]
    uploads: Vec<Listed>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    key: String,
    upload_id: String,
    initiated: String,
}

impl XmlUploads {
    fn failed(&self, message: impl Into<String>) -> Error {
        Error::Generic { store: self.name, source: message.into().into() }
    }

    /// One page of the uploads below a prefix, behind a key and an upload.
    async fn page(&self, prefix: &str, behind: &(String, String)) -> Result<Page> {
        let mut query = vec![("uploads", ""), ("prefix", prefix)];
        if !behind.0.is_empty() {
            query.extend([("key-marker", behind.0.as_str()), ("upload-id-marker", &behind.1)]);
        }
        let store = self.name;
        let request = self.requests.request(&query).await?;
        let answer = self
            .http
            .execute(request)
            .await
            .map_err(|source| Error::Generic { store, source: Box::new(source) })?;
        let status = answer.status();
        let body = answer.into_body().bytes().await;
        let body = body.map_err(|source| Error::Generic { store, source: Box::new(source) })?;
        let body = String::from_utf8_lossy(&body);
        if !status.is_success() {
            // In the form of the errors of `object_store`.
            return Err(self.failed(format!("status code: {status}: {body}")));
        }
        quick_xml::de::from_str(&body)
            .map_err(|error| self.failed(format!("{INVALID_LIST}: {error}")))
    }
}

#[async_trait]
impl OpenUploads for XmlUploads {
    async fn older(
        &self,
        folder: &Path,
        age: MinAge,
        action: LeftoverAction,
    ) -> Result<Vec<OpenUpload>> {
        let folder = folder.as_ref();
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut behind = (String::new(), String::new());
        let mut found = Vec::new();
        loop {
            let page = self.page(&prefix, &behind).await?;
            for upload in &page.uploads {
                let begun = chrono::DateTime::parse_from_rfc3339(&upload.initiated)
                    .map_err(|error| self.failed(format!("the time of an upload: {error}")))?;
                let begun = SystemTime::from(begun);
                // Some stores ignore the prefix.
                if !age.is_reached(begun) || !upload.key.starts_with(&prefix) {
                    continue;
                }
                // A key that is no path is not of this crate.
                let Ok(path) = Path::parse(&upload.key) else { continue };
                if action == LeftoverAction::Remove {
                    match self.store.abort_multipart(&path, &upload.upload_id).await {
                        Ok(()) => {}
                        Err(Error::NotFound { .. }) => continue,
                        Err(error) => return Err(error),
                    }
                }
                found.push(OpenUpload { path, begun });
            }
            let next = (page.next_key_marker, page.next_upload_id_marker);
            if !page.is_truncated || next == behind {
                return Ok(found);
            }
            behind = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_uploads_is_read() {
        let text = "<?xml version=\"1.0\"?><ListMultipartUploadsResult \
            xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>b</Bucket>\
            <NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>2</NextUploadIdMarker>\
            <IsTruncated>true</IsTruncated><Upload><Key>a &amp; b</Key><UploadId>1</UploadId>\
            <Owner><ID>x</ID></Owner><Initiated>2026-01-02T03:04:05.000Z</Initiated></Upload>\
            <Upload><Key>k</Key><UploadId>2</UploadId><Initiated>2026-01-02T03:04:05Z</Initiated>\
            </Upload></ListMultipartUploadsResult>";
        let page: Page = quick_xml::de::from_str(text).unwrap();
        assert!(page.is_truncated && page.next_key_marker == "k");
        assert_eq!(page.uploads[0].key, "a & b");
        assert_eq!(page.uploads[1].upload_id, "2");
        let empty = "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>\
            </ListMultipartUploadsResult>";
        let page: Page = quick_xml::de::from_str(empty).unwrap();
        assert!(!page.is_truncated && page.uploads.is_empty());
    }
}
