import { Page } from "../components/Page";

export function Workers() {
  return <Page title="Workers">{null}</Page>;
}
