import { Page } from "../components/Page";

export function Data() {
  return <Page title="Data">{null}</Page>;
}
